"""The parts of a decoder layer that are not a matmul or attention, as plain functions for any device.

Each computes in float32 where transformers does and returns its input's dtype.

Shape suffixes: T tokens, N heads (query and KV heads alike), D the last axis (hidden size, or head_dim after a heads
axis), F intermediate size, G = 2 * F, R = head_dim / 2 rotary frequencies.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import silu

from shared.model.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig


def rms_norm(x_D: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each last-axis vector to root mean square 1, times `weight_D` (arXiv 1910.07467).

    The weight may have leading axes that broadcast, as Qwen3's does over heads.
    """
    wide_D = x_D.float()
    normed_D = wide_D * torch.rsqrt(wide_D.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed_D.to(x_D.dtype)


def silu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product [T, F] of the fused projection [T, 2F], gate first (arXiv 2002.05202)."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return silu(gate_TF) * up_TF


def rotary_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Radians per position of each rotary pair, [head_dim / 2] in float32, scaled as the config says."""
    # The ladder is made on the CPU: a GPU's pow differs in the last bit, which far positions multiply.
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
    # 1 keeps a frequency (it turns often within the original context), 0 divides it by `factor`.
    keep_R = ((turns_R - scaling.low_freq_factor) / span).clamp(0, 1)
    return keep_R * frequencies_R + (1 - keep_R) * frequencies_R / scaling.factor


def rotary_cos_sin(
    positions_T: torch.Tensor, frequencies_R: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [T, 1, 2R] of each position's angles, computed in float32, once per forward for all layers.

    There is no table to size or to index out of range: at T tokens the angles cost less than one layer's norm.
    """
    angles_TR = positions_T.float()[:, None] * frequencies_R
    angles_TD = torch.cat((angles_TR, angles_TR), dim=-1)[:, None]
    return angles_TD.cos().to(dtype), angles_TD.sin().to(dtype)


def apply_rotary(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate every head by its token's angles; element i pairs with i + D / 2 (arXiv 2104.09864)."""
    first_TNR, second_TNR = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-second_TNR, first_TNR), dim=-1) * sin_T1D
