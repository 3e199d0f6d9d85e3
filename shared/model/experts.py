"""The sparse MLP of a mixture of experts: a router scores all experts for a token, which goes through a few of them.

`multiply` is plain torch on any device: what the torch backend computes, and the slow twin of `src/experts.cpp`.

Shape suffixes: T tokens, D hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from shared.model.layers import silu_mul
from shared.model.linear import Linear

L = TypeVar("L")


@dataclass(frozen=True, kw_only=True)
class Experts(Generic[L]):
    """The weights of a layer's experts. L is what became of a linear layer."""

    router: L
    """A score for each expert."""
    gate_up_E: tuple[L, ...]
    down_E: tuple[L, ...]
    top_k: int
    """Experts of a token: those with the largest scores."""
    is_normalized: bool
    """Whether the weights of a token's experts add up to 1. Else those of all experts do."""


def route(scores_TE: torch.Tensor, top_k: int, *, is_normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token [T, K], int64, and their weights [T, K], float32: a softmax over all scores.

    Of equal scores, that of the expert with the lower index comes first.
    """
    chosen_TK = torch.sort(scores_TE.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights_TK = scores_TE.float().softmax(-1).gather(-1, chosen_TK)
    if is_normalized:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return chosen_TK, weights_TK


def multiply(x_TD: torch.Tensor, scores_TE: torch.Tensor, experts: Experts[Linear]) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, D], added up in float32 by ascending index of the expert.

    Only experts that a token has chosen are computed, so the host waits for the device.
    """
    chosen_TK, weights_TK = route(scores_TE, experts.top_k, is_normalized=experts.is_normalized)
    sum_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for e in chosen_TK.unique().tolist():
        tokens_S, places_S = (chosen_TK == e).nonzero(as_tuple=True)
        product_SF = silu_mul(experts.gate_up_E[e].multiply(x_TD[tokens_S]))
        weighted_SD = experts.down_E[e].multiply(product_SF).float() * weights_TK[tokens_S, places_S, None]
        sum_TD[tokens_S] += weighted_SD
    return sum_TD.to(x_TD.dtype)
