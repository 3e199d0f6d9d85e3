"""Codes of 8 bits for rows, made anew for each token: x is about code * scale. The largest |x| has the largest code.

Codes are integers, or numbers of FP8 (e4m3). Activations of quantized layers and KV pages have them. `src/quantize.h`
is the native twin of integers. vLLM and SGLang compute the same for dynamic activations per token.
"""

from __future__ import annotations

import torch

LEAST = 1e-36
"""Rows whose largest value is below this have the codes 0: the largest code over it would be infinite."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The types of codes, and the largest of each."""


def quantize_rows(x_RD: torch.Tensor, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., R, D] of the dtype, and scales [..., R], float32. A code is the nearest; ties go to even."""
    x_RD, largest = x_RD.float(), LARGEST[dtype]
    most_R = x_RD.abs().amax(-1)
    # Not largest / most_R, which torch computes as largest * (1 / most_R).
    inverse_R = torch.where(most_R < LEAST, 0.0, torch.full_like(most_R, largest) / most_R)
    codes_RD = (x_RD * inverse_R[..., None]).nan_to_num(0.0).clamp(-largest, largest)
    return (codes_RD if dtype.is_floating_point else torch.round(codes_RD)).to(dtype), most_R / largest


def split_codes(pages_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of KV pages of a type of codes, [..., S, D + 4]: codes [..., S, D] and scales [..., S], float32.

    A head of a page holds the codes of its S tokens, then their scales.
    """
    *_, page_size, row_nbytes = pages_SE.shape
    head_dim = row_nbytes - 4
    head_E = pages_SE.flatten(-2)
    codes_SD = head_E[..., : page_size * head_dim].view(*pages_SE.shape[:-1], head_dim)
    return codes_SD, head_E[..., page_size * head_dim :].view(torch.float32)
