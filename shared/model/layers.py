"""The operations of a decoder layer besides matmul and attention, as functions for any device.

Each one computes in float32 where transformers does, and returns the dtype of its input.

Shape suffixes: T tokens, N heads (query and KV heads alike), D the last axis (hidden size, or head_dim after a heads
axis), F intermediate size, G = 2 * F, R = head_dim / 2 rotary frequencies.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import silu

from shared.model.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig


def rms_norm(x_D: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each last-axis vector to root mean square 1, then by `weight_D` (arXiv 1910.07467).

    The weight may have leading axes that broadcast. The weight of Qwen3 broadcasts over heads.
    """
    wide_D = x_D.float()
    normed_D = wide_D * torch.rsqrt(wide_D.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed_D.to(x_D.dtype)


def silu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, F] of the fused projection [T, 2F], gate first: SwiGLU (arXiv 2002.05202)."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return silu(gate_TF) * up_TF


def rotary_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Return the radians per position of each rotary pair, float32 [head_dim / 2], scaled as the config says."""
    # Computed on the CPU: a GPU's pow differs in the last bit, and large positions multiply that error.
    exponent_R = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies_R = 1.0 / (config.rope_theta**exponent_R)
    match config.rope_scaling:
        case LinearRopeScaling(factor=factor):
            frequencies_R = frequencies_R / factor
        case Llama3RopeScaling() as scaling:
            frequencies_R = _llama3_scaled(frequencies_R, scaling)
    return frequencies_R.to(device)


def _llama3_scaled(frequencies_R: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    turns_R = scaling.original_max_position_embeddings * frequencies_R / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    # 1 keeps a frequency, which turns often within the original context. 0 divides it by `factor`.
    keep_R = ((turns_R - scaling.low_freq_factor) / span).clamp(0, 1)
    return keep_R * frequencies_R + (1 - keep_R) * frequencies_R / scaling.factor


def rotary_cos_sin(
    positions_T: torch.Tensor, frequencies_R: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [T, 1, 2R] of the angles of each position. A forward computes them once for all layers.

    There is no table of all positions: computing the angles of T tokens costs less than the norm of one layer.
    """
    angles_TR = positions_T.float()[:, None] * frequencies_R
    angles_TD = torch.cat((angles_TR, angles_TR), dim=-1)[:, None]
    return angles_TD.cos().to(dtype), angles_TD.sin().to(dtype)


def apply_rotary(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate every head by the angles of its token. Element i pairs with i + D / 2 (arXiv 2104.09864)."""
    first_TNR, second_TNR = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-second_TNR, first_TNR), dim=-1) * sin_T1D
