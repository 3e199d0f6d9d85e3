"""A mixture of experts: a router scores all experts for a token, and the token goes through a few of them.

`multiply` is what the torch backend computes, and the slow twin of `src/experts.cpp`.

Shape suffixes: T tokens, D hidden size, E experts, K experts of a token, S tokens of one expert, G gate and up,
F = G / 2.
"""

from __future__ import annotations

import torch

from shared.model.layer_records import SwigluClamp
from shared.model.layers import clamped_silu_mul
from shared.model.linear import Linear
from shared.model.ops import Ops
from shared.model.weights import ExpertsWeights


def route(scores_TE: torch.Tensor, top_k: int, *, is_normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token [T, K], int64, and their weights [T, K], float32: a softmax over all scores.

    Of equal scores, that of the expert with the lower index comes first. A NaN comes last.
    """
    scores_TE = scores_TE.float()
    order_TE = torch.sort(scores_TE.nan_to_num(-torch.inf, torch.inf), descending=True, stable=True).indices
    chosen_TK = order_TE[:, :top_k]
    weights_TK = scores_TE.softmax(-1).gather(-1, chosen_TK)
    if is_normalized:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return chosen_TK, weights_TK


def activate(gate_up_SG: torch.Tensor, clamp: SwigluClamp | None, ops: Ops) -> torch.Tensor:
    """SwiGLU's product [S, F], clamped as gpt-oss has it, or plain."""
    if clamp is None:
        return ops.silu_mul(gate_up_SG)
    return clamped_silu_mul(gate_up_SG, clamp.limit, clamp.alpha)


def multiply(
    x_TD: torch.Tensor, scores_TE: torch.Tensor, weights: ExpertsWeights[Linear], ops: Ops
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, D], added up in float32 by ascending index of the expert.

    Only experts that a token has chosen are computed, so the host waits for the device once.
    """
    chosen_TK, weights_TK = route(scores_TE, weights.top_k, is_normalized=weights.is_normalized)
    by_expert = torch.argsort(chosen_TK.flatten(), stable=True)
    counts_E = torch.bincount(chosen_TK.flatten(), minlength=len(weights.experts))
    sum_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert, places_S in zip(weights.experts, torch.split(by_expert, counts_E.tolist()), strict=True):
        if len(places_S) == 0:
            continue
        tokens_S = places_S // weights.top_k
        gate_up_SG = ops.linear(x_TD[tokens_S], expert.gate_up_proj)
        y_SD = ops.linear(activate(gate_up_SG, weights.clamp, ops), expert.down_proj)
        sum_TD[tokens_S] += y_SD.float() * weights_TK.flatten()[places_S, None]
    return sum_TD.to(x_TD.dtype)
