"""Logits to token ids, for a whole batch at once on the device.

A sample is a pure function of (logits, params, uniform), and the uniform of (seed, output position). Filters cut
by *value* and the inverse CDF walks the vocabulary by *id*: two nearly equal probabilities that swap ranks (as
logits of another batch shape may make them) cannot change what is drawn, as a walk in sorted order would.
"""

from __future__ import annotations

import torch

from shared.engine.sampling_inputs import DrawInputs, SamplingInputs, adjust_logits


def sample(logits_SV: torch.Tensor, inputs: SamplingInputs[torch.Tensor]) -> torch.Tensor:
    """Next token ids, int64 [S]; `logits_SV` is float32 and may be overwritten."""
    adjust_logits(logits_SV, inputs)
    return draw(logits_SV, inputs.draws)


def draw(logits_SV: torch.Tensor, draws: DrawInputs[torch.Tensor] | None) -> torch.Tensor:
    """Token ids, int64 [S], of adjusted logits. The slow twin of `shared/kernels/cpu/src/sampling.cpp`."""
    greedy_S = logits_SV.argmax(dim=-1)
    if draws is None:
        return greedy_S
    temperature_S = draws.temperatures_S
    is_greedy_S = temperature_S == 0
    probs_SV = torch.softmax(logits_SV / torch.where(is_greedy_S, 1.0, temperature_S)[:, None], dim=-1)
    if draws.needs_filter:
        probs_SV = _filter(probs_SV, draws)
    cdf_SV = probs_SV.cumsum(dim=-1, dtype=torch.float64)
    target_S1 = draws.uniforms_S[:, None] * cdf_SV[:, -1:]
    drawn_S = torch.searchsorted(cdf_SV, target_S1, right=True)[:, 0].clamp_(max=logits_SV.shape[1] - 1)
    return torch.where(is_greedy_S, greedy_S, drawn_S)


def _filter(probs_SV: torch.Tensor, draws: DrawInputs[torch.Tensor]) -> torch.Tensor:
    """Zero what top-k, top-p and min-p exclude; each is a threshold on the probability, ties stay in.

    top-p keeps the smallest set of most likely tokens whose mass reaches p, after top-k; min-p keeps tokens at
    least min_p times as likely as the likeliest (Nguyen et al. 2024, "Turning up the heat").
    """
    sorted_SV = probs_SV.sort(dim=-1, descending=True).values
    vocab_size = probs_SV.shape[1]
    top_k_S = draws.top_ks_S
    top_k_S = torch.where(top_k_S <= 0, vocab_size, top_k_S.clamp(max=vocab_size))
    rank_V = torch.arange(vocab_size, device=probs_SV.device)
    kept_SV = torch.where(rank_V < top_k_S[:, None], sorted_SV, 0.0)
    kept_SV = kept_SV / kept_SV.sum(dim=-1, keepdim=True)
    mass_before_SV = kept_SV.cumsum(dim=-1, dtype=torch.float64) - kept_SV
    top_p_S = draws.top_ps_S
    inside_SV = (mass_before_SV < top_p_S[:, None]) & (rank_V < top_k_S[:, None])
    last_S1 = (inside_SV.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    # A row that asks for neither must not lose its tail to rounding because another row of its batch filters.
    unfiltered_S = (top_k_S >= vocab_size) & (top_p_S >= 1.0)
    threshold_S1 = sorted_SV.gather(1, last_S1).masked_fill(unfiltered_S[:, None], 0.0)
    min_p_S1 = draws.min_ps_S[:, None]
    threshold_S1 = torch.maximum(threshold_S1, min_p_S1 * sorted_SV[:, :1])
    return torch.where(probs_SV >= threshold_S1, probs_SV, 0.0)
