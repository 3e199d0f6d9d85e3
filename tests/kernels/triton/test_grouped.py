"""All experts in one launch beside the loop over them, and what a token's result depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from shared.engine.cuda.triton_ops import ExpertStacks
from shared.kernels.triton import grouped
from shared.kernels.triton.linear import FLOAT32, Tile
from shared.model.experts import multiply, route
from shared.model.linear import DenseLinear, Linear, QuantizedLinear
from shared.model.weights import ExpertsWeights, MlpWeights
from tests.device import device
from tests.unit.model.dense_ops import DenseOps

DEVICE = device()
SMALL = Tile(16, 16, num_warps=4, num_stages=2, num_programs=2)


@dataclass(frozen=True)
class Kind:
    """Of codes in groups of 32."""

    bits: int
    has_zeros: bool = False
    is_weight_only: bool = False
    is_float: bool = False


KINDS = {
    "int8": Kind(8),
    "int4-zeros": Kind(4, has_zeros=True),
    "int8-weight-only": Kind(8, is_weight_only=True),
    "int4-zeros-weight-only": Kind(4, has_zeros=True, is_weight_only=True),
    "fp8": Kind(8, is_float=True),
    "fp8-weight-only": Kind(8, is_weight_only=True, is_float=True),
    "fp4": Kind(4, is_float=True),
    "fp4-weight-only": Kind(4, is_weight_only=True, is_float=True),
}


def mixture(
    num_experts: int, top_k: int, size: int, width: int, *, has_bias: bool, kind: Kind | None = None
) -> ExpertsWeights[Linear]:
    generator = torch.Generator().manual_seed(num_experts)

    def linear(n: int, k: int) -> Linear:
        bias_N = torch.randn(n, generator=generator).to(DEVICE) if has_bias else None
        if kind is None:
            weight_NK = torch.randn(n, k, generator=generator) / k**0.5
            return DenseLinear(weight_NK=weight_NK.to(DEVICE), bias_N=bias_N)
        zeros_NG = None
        if kind.has_zeros:
            zeros_NG = torch.randint(0, 1 << kind.bits, (n, k // 32), generator=generator, dtype=torch.uint8)
        is_fp8 = kind.is_float and kind.bits == 8
        most = 0x7F if is_fp8 else 1 << kind.bits  # no NaN of FP8
        made = QuantizedLinear(
            codes_NK=torch.randint(0, most, (n, k), generator=generator, dtype=torch.uint8),
            bits=kind.bits,
            scales_NG=torch.rand(n, k // 32, generator=generator)
            * 6
            / (k**0.5 * (448 if is_fp8 else 1 << kind.bits)),
            zeros_NG=zeros_NG,
            is_weight_only=kind.is_weight_only,
            is_float=kind.is_float,
        )
        return replace(made.packed().to(DEVICE), bias_N=bias_N)

    experts = [
        MlpWeights[Linear](gate_up_proj=linear(2 * width, size), down_proj=linear(size, width))
        for _ in range(num_experts)
    ]
    router = DenseLinear(weight_NK=torch.empty(num_experts, size), bias_N=None)
    return ExpertsWeights(router=router, experts=tuple(experts), top_k=top_k, is_normalized=True)


def computed(
    weights: ExpertsWeights[Linear],
    x_TD: torch.Tensor,
    scores_TE: torch.Tensor,
    tile: Tile | None,
    rows: int | None = None,
) -> torch.Tensor:
    gate_up, down = ExpertStacks(3).of(weights)
    chosen_TK, weights_TK = route(scores_TE, weights.top_k, is_normalized=True)
    assert weights.can_be_grouped
    groups = grouped.Groups.of(chosen_TK, len(weights.experts), rows or (tile or FLOAT32).m)
    gate_up_PG = grouped.grouped_linear(x_TD, gate_up, groups, weights.top_k, 3, tile)
    gate_PF, up_PF = gate_up_PG.chunk(2, dim=1)
    product_PF = torch.nn.functional.silu(gate_PF) * up_PF
    return grouped.sum_experts(
        grouped.grouped_linear(product_PF, down, groups, 1, 3, tile), weights_TK, chosen_TK
    )


@pytest.mark.parametrize("tile", [FLOAT32, SMALL], ids=["64x32", "16x16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "size", "width"),
    [(1, 5, 2, 64, 48), (1, 1, 1, 32, 16), (7, 8, 8, 40, 24), (40, 3, 2, 128, 80), (50, 12, 3, 64, 32)],
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


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rows", [16, 64])
def test_quantized_experts_beside_a_loop(kind: Kind, rows: int) -> None:
    weights = mixture(6, 3, 64, 32, has_bias=kind.bits == 4, kind=kind)
    generator = torch.Generator().manual_seed(1)
    x_TD, scores_TE = (torch.randn(24, size, generator=generator).to(DEVICE) for size in (64, 6))
    whole = computed(weights, x_TD, scores_TE, None, rows)
    expected = multiply(x_TD, scores_TE, weights, DenseOps(0))
    torch.testing.assert_close(
        whole, expected, atol=2e-3, rtol=1e-3
    )  # a code may round otherwise behind SiLU
    assert 0.05 < expected.std() < 50
    assert torch.equal(computed(weights, x_TD[3:5], scores_TE[3:5], None, rows), whole[3:5])


def test_a_token_has_the_same_bits_whoever_shares_its_experts() -> None:
    weights = mixture(6, 2, 64, 48, has_bias=True)
    generator = torch.Generator().manual_seed(0)
    x_TD, scores_TE = (torch.randn(50, size, generator=generator).to(DEVICE) for size in (64, 6))
    whole = computed(weights, x_TD, scores_TE, FLOAT32)
    for part in (slice(0, 1), slice(3, 20), slice(49, 50)):
        for tile in (FLOAT32, SMALL):
            assert torch.equal(computed(weights, x_TD[part], scores_TE[part], tile), whole[part])


def test_few_rows_have_low_tiles() -> None:
    rows = [grouped.tile_rows(8 * tokens, 128, torch.bfloat16) for tokens in (1, 256, 257, 2048)]
    assert rows == [16, 16, 64, 64]
