"""The operations of a decoder layer besides matmul and attention, as functions for any device.

Each one computes in float32 where transformers does, and returns the dtype of its input.

Shape suffixes: T tokens, N heads (query and KV heads alike), D the last axis (hidden size, or head_dim after a heads
axis), F intermediate size, G = 2 * F, R = head_dim / 2 rotary pairs.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def rms_norm(x_D: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each last-axis vector to root mean square 1, then by `weight_D` (arXiv 1910.07467).

    The weight may have leading axes that broadcast. The weight of Qwen3 broadcasts over heads. The product has the
    type of the weight: that of x in most models, float32 in Gemma's.
    """
    wide_D = x_D.float()
    normed_D = wide_D * torch.rsqrt(wide_D.pow(2).mean(-1, keepdim=True) + eps)
    return (weight_D * normed_D.to(weight_D.dtype)).to(x_D.dtype)


def clamped_silu_mul(gate_up_TG: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + 1) [T, F], gate at most `limit` and up within it (gpt-oss)."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return gate_TF * torch.sigmoid(alpha * gate_TF) * (up_TF + 1)


def silu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, F] of the fused projection [T, 2F], gate first: SwiGLU (arXiv 2002.05202)."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return silu(gate_TF) * up_TF


def gelu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, as `silu_mul`: GEGLU, with GELU's approximation by tanh."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return gelu(gate_TF, approximate="tanh") * up_TF


def rotary_cos_sin(
    positions_T: torch.Tensor, waves_2R: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [T, 1, 2R] of the angles of each position, times their amplitudes.

    `waves_2R` is that of `rotary_waves`. A forward computes them once for all layers.

    There is no table of all positions: computing the angles of T tokens costs less than the norm of one layer.
    """
    frequencies_D, amplitudes_D = waves_2R.tile(1, 2).unbind()
    angles_T1D = (positions_T.float()[:, None] * frequencies_D)[:, None]
    return (angles_T1D.cos() * amplitudes_D).to(dtype), (angles_T1D.sin() * amplitudes_D).to(dtype)


def apply_rotary(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate every head by the angles of its token. Element i pairs with i + D / 2 (arXiv 2104.09864)."""
    first_TNR, second_TNR = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-second_TNR, first_TNR), dim=-1) * sin_T1D
