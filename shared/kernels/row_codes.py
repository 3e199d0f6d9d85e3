"""Codes of 8 bits for rows, made anew for each token: x is about code * scale. The largest |x| has the code 127.

Activations of quantized layers and KV pages of int8 have them. `src/quantize.h` is the native twin. vLLM and SGLang
compute the same for dynamic activations per token.
"""

from __future__ import annotations

import torch

LEAST = 1e-36
"""Rows whose largest value is below this have the codes 0: 127 over it would be infinite."""


def quantize_rows(x_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., R, D], int8, and scales [..., R], float32."""
    x_RD = x_RD.float()
    most_R = x_RD.abs().amax(-1)
    # Not 127.0 / most_R, which torch computes as 127.0 * (1 / most_R).
    inverse_R = torch.where(most_R < LEAST, 0.0, torch.full_like(most_R, 127.0) / most_R)
    codes_RD = torch.round(x_RD * inverse_R[..., None]).nan_to_num(0.0).clamp(-127, 127)
    return codes_RD.to(torch.int8), most_R / 127.0


def split_codes(pages_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of KV pages of int8 [..., S, D + 4]: codes [..., S, D] and scales [..., S], float32.

    A head of a page holds the codes of its S tokens, then their scales.
    """
    *_, page_size, row_nbytes = pages_SE.shape
    head_dim = row_nbytes - 4
    head_E = pages_SE.flatten(-2)
    codes_SD = head_E[..., : page_size * head_dim].view(*pages_SE.shape[:-1], head_dim)
    return codes_SD, head_E[..., page_size * head_dim :].view(torch.float32)
