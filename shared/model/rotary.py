"""The frequencies and amplitudes of rotary embeddings, as transformers computes them (`modeling_rope_utils.py`).

Shape suffix: R = head_dim / 2 pairs of elements.
"""

from __future__ import annotations

import math

import torch

from shared.model.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling


def rotary_waves(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return float32 [2, R]: radians per position of each pair, and what multiplies its cosine and sine.

    A pair that is not rotated has the angle 0.
    """
    # Computed on the CPU: a GPU's pow differs in the last bit, and large positions multiply that error.
    exponent_R = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies_R, amplitude = 1.0 / (rope.theta**exponent_R), 1.0
    match rope.scaling:
        case LinearScaling(factor=factor):
            frequencies_R = frequencies_R / factor
        case Llama3Scaling() as scaling:
            frequencies_R = _llama3_scaled(frequencies_R, scaling)
        case YarnScaling() as scaling:
            frequencies_R, amplitude = (
                _yarn_scaled(rope.theta**exponent_R, rope.theta, scaling),
                scaling.amplitude,
            )
        case DynamicScaling() as scaling:
            frequencies_R = 1.0 / (_dynamic_theta(rope.theta, rope.rotary_dim, scaling) ** exponent_R)
        case LongScaling() as scaling:
            factors = scaling.long_factor if scaling.is_long else scaling.short_factor
            frequencies_R, amplitude = (
                1.0 / (torch.tensor(factors) * rope.theta**exponent_R),
                scaling.amplitude,
            )
    waves_2R = torch.tensor([[0.0], [1.0]]).repeat(1, head_dim // 2)
    waves_2R[0, : len(frequencies_R)], waves_2R[1, : len(frequencies_R)] = frequencies_R, amplitude
    return waves_2R.to(device)


def _llama3_scaled(frequencies_R: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns_R = scaling.original_max_position_embeddings * frequencies_R / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    # 1 keeps a frequency, which turns often within the original context. 0 divides it by `factor`.
    keep_R = ((turns_R - scaling.low_freq_factor) / span).clamp(0, 1)
    return keep_R * frequencies_R + (1 - keep_R) * frequencies_R / scaling.factor


def _yarn_scaled(periods_R: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    dim = 2 * len(periods_R)

    def pair_that_turns(times: float) -> float:
        """Within the original context."""
        turns = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast or 32), pair_that_turns(scaling.beta_slow or 1)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp_R = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    divide_R = ramp_R.clamp(0, 1)
    return divide_R / (scaling.factor * periods_R) + (1 - divide_R) / periods_R


def _dynamic_theta(theta: float, dim: int, scaling: DynamicScaling) -> float:
    longer = (
        max(scaling.length, scaling.original_max_position_embeddings)
        / scaling.original_max_position_embeddings
    )
    return float(theta * (scaling.factor * longer - (scaling.factor - 1)) ** (dim / (dim - 2)))
