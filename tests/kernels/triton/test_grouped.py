"""All experts in one launch beside the loop over them, and what a token's result depends on."""

from __future__ import annotations

import pytest
import torch

from shared.engine.cuda.triton_ops import ExpertStacks
from shared.kernels.triton import grouped
from shared.kernels.triton.linear import FLOAT32, Tile
from shared.model.experts import multiply, route
from shared.model.linear import DenseLinear, Linear
from shared.model.weights import ExpertsWeights, MlpWeights
from tests.device import device
from tests.unit.model.dense_ops import DenseOps

DEVICE = device()
SMALL = Tile(16, 16, num_warps=4, num_stages=2, num_programs=2)


def mixture(num_experts: int, top_k: int, size: int, width: int, *, has_bias: bool) -> ExpertsWeights[Linear]:
    generator = torch.Generator().manual_seed(num_experts)

    def linear(n: int, k: int) -> DenseLinear:
        weight = torch.randn(n, k, generator=generator) / k**0.5
        bias = torch.randn(n, generator=generator) if has_bias else None
        return DenseLinear(weight_NK=weight.to(DEVICE), bias_N=None if bias is None else bias.to(DEVICE))

    experts = [
        MlpWeights[Linear](gate_up_proj=linear(2 * width, size), down_proj=linear(size, width))
        for _ in range(num_experts)
    ]
    router = linear(num_experts, size)
    return ExpertsWeights(router=router, experts=tuple(experts), top_k=top_k, is_normalized=True)


def computed(
    weights: ExpertsWeights[Linear], x_TD: torch.Tensor, scores_TE: torch.Tensor, tile: Tile
) -> torch.Tensor:
    gate_up, down = ExpertStacks(3).of(weights)
    chosen_TK, weights_TK = route(scores_TE, weights.top_k, is_normalized=True)
    groups = grouped.Groups.of(chosen_TK, len(weights.experts), tile.m)
    gate_up_PG = grouped.grouped_linear(x_TD, gate_up, groups, weights.top_k, tile, 3)
    gate_PF, up_PF = gate_up_PG.chunk(2, dim=1)
    product_PF = torch.nn.functional.silu(gate_PF) * up_PF
    return grouped.sum_experts(
        grouped.grouped_linear(product_PF, down, groups, 1, tile, 3), weights_TK, chosen_TK
    )


@pytest.mark.parametrize("tile", [FLOAT32, SMALL], ids=["64x32", "16x16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "size", "width"),
    [(1, 5, 2, 64, 48), (1, 1, 1, 32, 16), (7, 8, 8, 40, 24), (40, 3, 2, 128, 80), (90, 20, 3, 64, 32)],
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_beside_a_loop_over_experts(
    num_tokens: int, num_experts: int, top_k: int, size: int, width: int, has_bias: bool, tile: Tile
) -> None:
    """Experts may have no token, and one may have nearly all."""
    weights = mixture(num_experts, top_k, size, width, has_bias=has_bias)
    generator = torch.Generator().manual_seed(num_tokens)
    x_TD = torch.randn(num_tokens, size, generator=generator).to(DEVICE)
    for liked in (None, num_experts - 1):
        scores_TE = torch.randn(num_tokens, num_experts, generator=generator).to(DEVICE)
        if liked is not None:
            scores_TE[1:, liked] += 9.0
        expected = multiply(x_TD, scores_TE, weights, DenseOps(0))
        torch.testing.assert_close(computed(weights, x_TD, scores_TE, tile), expected, atol=1e-4, rtol=1e-4)


def test_a_token_has_the_same_bits_whoever_shares_its_experts() -> None:
    weights = mixture(6, 2, 64, 48, has_bias=True)
    generator = torch.Generator().manual_seed(0)
    x_TD, scores_TE = (torch.randn(50, size, generator=generator).to(DEVICE) for size in (64, 6))
    whole = computed(weights, x_TD, scores_TE, FLOAT32)
    for part in (slice(0, 1), slice(3, 20), slice(49, 50)):
        for tile in (FLOAT32, SMALL):
            assert torch.equal(computed(weights, x_TD[part], scores_TE[part], tile), whole[part])


def test_the_least_tile_that_holds_an_experts_rows() -> None:
    tiles = [grouped.tile_for(8 * tokens, 128, torch.bfloat16).m for tokens in (1, 256, 257, 2048)]
    assert tiles == [16, 16, 64, 64]
    assert grouped.tile_for(1 << 20, 8, torch.float32) is FLOAT32
