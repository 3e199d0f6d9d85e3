"""Sampling, one row at a time in numpy float64: the slow twin of `shared.engine.sampler`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shared.engine.model_worker_batch import uniforms
from shared.protocol.sampling_params import SamplingParams


def uniform(seed: int, position: int) -> float:
    """That of one pair."""
    return float(uniforms([seed], [position])[0])


def naive_penalize(
    logits_V: np.ndarray, params: SamplingParams, input_ids: Sequence[int], output_ids: Sequence[int]
) -> np.ndarray:
    """Token by token: repetition over prompt and output, frequency and presence over the output, then the bias."""
    logits_V = logits_V.astype(np.float64).copy()
    r = params.repetition_penalty
    for token in {*input_ids, *output_ids}:
        logits_V[token] = logits_V[token] / r if logits_V[token] > 0 else logits_V[token] * r
    for token in output_ids:
        logits_V[token] -= params.frequency_penalty
    for token in set(output_ids):
        logits_V[token] -= params.presence_penalty
    for entry in params.logit_bias:
        logits_V[entry.token_id] += entry.bias
    return logits_V


def naive_logprobs(logits_V: np.ndarray) -> np.ndarray:
    """log_softmax, in float64."""
    logits_V = logits_V.astype(np.float64)
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def naive_probs(logits_V: np.ndarray, params: SamplingParams, masked_ids: Iterable[int] = ()) -> np.ndarray:
    """What may be drawn, and how likely it is: temperature, then top-k, then top-p and min-p."""
    logits_V = logits_V.astype(np.float64).copy()
    logits_V[list(masked_ids)] = -np.inf
    if params.is_greedy:
        return np.eye(len(logits_V))[int(logits_V.argmax())]
    scaled_V = logits_V / params.temperature
    probs_V = np.exp(scaled_V - scaled_V.max())
    probs_V /= probs_V.sum()
    by_rank = sorted(range(len(probs_V)), key=lambda i: -probs_V[i])
    top_k = params.top_k if params.top_k > 0 else len(probs_V)
    among_k = by_rank[:top_k]
    mass_k = probs_V[among_k].sum()
    kept, mass = [], 0.0
    for token in among_k:
        if kept and mass >= params.top_p * mass_k:
            break
        if probs_V[token] < params.min_p * probs_V[by_rank[0]]:
            break
        kept.append(token)
        mass += probs_V[token]
    filtered_V = np.zeros_like(probs_V)
    filtered_V[kept] = probs_V[kept]
    return filtered_V / filtered_V.sum()


def naive_sample(
    logits_V: np.ndarray, params: SamplingParams, position: int, masked_ids: Iterable[int] = ()
) -> int:
    """The token that (seed, position) draws: the first id whose cumulative probability exceeds the uniform."""
    cdf_V = naive_probs(logits_V, params, masked_ids).cumsum()
    return int(np.searchsorted(cdf_V, uniform(params.seed, position) * cdf_V[-1], side="right"))
