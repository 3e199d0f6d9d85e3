"""The native experts against their definition in torch, and the bits of a token in any batch and team."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.cpu.library import Team
from shared.model.experts import multiply, route
from shared.model.layer_records import SwigluClamp
from shared.model.layers import clamped_silu_mul
from shared.model.linear import DenseLinear, Linear, QuantizedLinear, quantize_weight
from shared.model.packed_weights import Packer
from shared.model.weights import ExpertsWeights, MlpWeights
from tests.kernels.cpu.prototypes import kernel
from tests.unit.model.dense_ops import DenseOps


@dataclass(frozen=True)
class Shape:
    hidden: int
    size: int
    num_experts: int
    top_k: int
    bits: int = 16
    group: int = 0
    weight_only: bool = False
    normalized: bool = True
    bias: bool = False
    order: bool = False
    zeros: bool = False
    fp4: bool = False
    clamped: bool = False

    def __str__(self) -> str:
        names = ("weight_only", "normalized", "bias", "order", "zeros", "fp4", "clamped")
        flags = "".join(f"-{name}" for name in names if getattr(self, name))
        of = f"D{self.hidden}-F{self.size}-E{self.num_experts}-K{self.top_k}"
        return f"{of}-w{self.bits}g{self.group}{flags}"


SHAPES = [
    Shape(64, 32, 4, 1),
    Shape(96, 40, 21, 5, normalized=False, bias=True),
    Shape(130, 70, 8, 8),  # every expert
    Shape(1060, 64, 8, 8),  # rows that no cache keeps, so a task has several panels of down
    Shape(96, 48, 8, 2, 8, 48, bias=True),
    Shape(96, 48, 8, 2, 4, 24, zeros=True),
    Shape(128, 64, 20, 4, 4, 32, normalized=False),
    Shape(128, 64, 8, 3, 4, 32, order=True),
    Shape(128, 64, 8, 3, 8, 64, weight_only=True, order=True),
    Shape(64, 128, 16, 2, 4, 64, weight_only=True),
    Shape(96, 40, 8, 4, bias=True, clamped=True),
    Shape(96, 64, 20, 4, 4, 32, bias=True, fp4=True, clamped=True),
    Shape(96, 64, 8, 4, 4, 32, weight_only=True, bias=True, fp4=True, clamped=True),
]
CLAMP = SwigluClamp(limit=1.5, alpha=1.702)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def experts_of(shape: Shape) -> ExpertsWeights[Linear]:
    generator = torch.Generator().manual_seed(5)

    def linear(n: int, k: int) -> Linear:
        weight_NK = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
        bias_N = torch.randn(n, generator=generator) if shape.bias else None
        if shape.bits == 16:
            return DenseLinear(weight_NK=weight_NK, bias_N=bias_N if bias_N is None else bias_N.bfloat16())
        layer = quantize_weight(weight_NK, bits=shape.bits, group_size=shape.group)
        if shape.fp4:
            powers_NG = torch.randint(-8, -4, layer.scales_NG.shape, generator=generator).float().exp2()
            layer = replace(layer, scales_NG=powers_NG, is_float=True)
        has_order = shape.order and bool(torch.rand((), generator=generator) < 0.7)  # some experts have none
        order_K = torch.randperm(k, generator=generator) if has_order else None
        if shape.zeros:
            zeros_NG = torch.randint(6, 11, layer.scales_NG.shape, generator=generator, dtype=torch.uint8)
            layer = replace(layer, zeros_NG=zeros_NG)
        return replace(layer, bias_N=bias_N, order_K=order_K, is_weight_only=shape.weight_only)

    def expert() -> MlpWeights[Linear]:
        return MlpWeights(
            gate_up_proj=linear(2 * shape.size, shape.hidden), down_proj=linear(shape.hidden, shape.size)
        )

    return ExpertsWeights(
        router=linear(shape.num_experts, shape.hidden),
        experts=tuple(expert() for _ in range(shape.num_experts)),
        top_k=shape.top_k,
        is_normalized=shape.normalized,
        clamp=CLAMP if shape.clamped else None,
    )


class Packed:
    """Experts as the decoder packs them."""

    def __init__(self, team: Team, weights: ExpertsWeights[Linear]) -> None:
        self._packer = Packer(team)
        packed = ExpertsWeights(
            router=self._packer.linear(weights.router),
            experts=tuple(
                MlpWeights(
                    gate_up_proj=self._packer.linear(each.gate_up_proj, is_gate_up=True),
                    down_proj=self._packer.linear(each.down_proj),
                )
                for each in weights.experts
            ),
            top_k=weights.top_k,
            is_normalized=weights.is_normalized,
            clamp=weights.clamp,
        )
        self._desc = self._packer.experts(packed)

    def add(
        self, team: Team, x_MD: torch.Tensor, scores_ME: torch.Tensor, residual_MD: torch.Tensor
    ) -> torch.Tensor:
        """residual + the experts' outputs."""
        scores_ME, residual_MD = scores_ME.clone(), residual_MD.clone()
        pointers = x_MD.data_ptr(), scores_ME.data_ptr(), len(x_MD), residual_MD.data_ptr()
        kernel(team, "baton_experts")(team.handle, ctypes.addressof(self._desc), *pointers)
        return residual_MD


def inputs_of(shape: Shape, m: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_MD = torch.randn(m, shape.hidden, generator=generator).bfloat16()
    scores_ME = 2 * torch.randn(m, shape.num_experts, generator=generator)
    return x_MD, scores_ME, torch.randn(m, shape.hidden, generator=generator)


@pytest.mark.parametrize("m", [0, 1, 7, 300])
@shapes
def test_it_is_near_its_definition(team: Team, shape: Shape, m: int) -> None:
    """Products of gate and up are bf16 here, and float32 in the definition with float32 inputs."""
    experts = experts_of(shape)
    x_MD, scores_ME, residual_MD = inputs_of(shape, m)
    actual = Packed(team, experts).add(team, x_MD, scores_ME, residual_MD) - residual_MD
    expected = multiply(x_MD.float(), scores_ME, widened(experts), DenseOps(0))
    assert actual.shape == expected.shape
    error = (actual - expected).norm() if m else torch.zeros(())
    assert error <= (0.02 if shape.bits < 16 and not shape.weight_only else 0.004) * expected.norm()


def widened(weights: ExpertsWeights[Linear]) -> ExpertsWeights[Linear]:
    def of(linear: Linear) -> Linear:
        if isinstance(linear, QuantizedLinear):
            return linear
        bias_N = None if linear.bias_N is None else linear.bias_N.float()
        return DenseLinear(weight_NK=linear.weight_NK.float(), bias_N=bias_N)

    experts = (
        MlpWeights(gate_up_proj=of(each.gate_up_proj), down_proj=of(each.down_proj))
        for each in weights.experts
    )
    return replace(weights, experts=tuple(experts))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_any_batch_and_team(library: ctypes.CDLL, data: st.DataObject) -> None:
    """Some experts are popular, so that blocks of rows and groups of panels differ from batch to batch."""
    shape, m = data.draw(st.sampled_from(SHAPES)), 450
    x_MD, scores_ME, residual_MD = inputs_of(shape, m)
    scores_ME += data.draw(st.sampled_from([0.0, 4.0])) * torch.arange(shape.num_experts) / shape.num_experts
    tokens = data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=60, unique=True))
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, m - 2))
        tokens = list(range(first, data.draw(st.integers(first + 1, m))))
    teams = [Team(library, [-1] * size) for size in (1, 2, 5)]
    try:
        packed = Packed(teams[0], experts_of(shape))
        whole = packed.add(teams[0], x_MD, scores_ME, residual_MD)
        for team in teams:
            part = packed.add(team, x_MD[tokens], scores_ME[tokens], residual_MD[tokens])
            assert torch.equal(part, whole[tokens])
    finally:
        for team in teams:
            team.close()


def experts_that_give(values: list[float], shape: Shape) -> ExpertsWeights[Linear]:
    """Each expert gives its own value, whatever its input."""

    def constant(n: int, value: float) -> Linear:
        weight_NK = torch.zeros(n, 16, dtype=torch.bfloat16)
        return DenseLinear(weight_NK=weight_NK, bias_N=torch.full((n,), value, dtype=torch.bfloat16))

    experts = (MlpWeights(gate_up_proj=constant(32, 1.0), down_proj=constant(16, each)) for each in values)
    return replace(experts_of(shape), experts=tuple(experts))


def test_outputs_are_added_up_in_float32_by_ascending_index(team: Team) -> None:
    """In bfloat16 128 + 0.5 is 128. The last expert, which has the largest score, vanishes beside the first."""
    x_MD = torch.ones(1, 16, dtype=torch.bfloat16)
    for values, last_score, expected in (
        ([384.0, 1.5, 1.5], 0.0, 129.0),
        ([2.0**40, -(2.0**40), 1.0], 9.0, 1.0),
    ):
        experts, scores_ME = (
            experts_that_give(values, Shape(16, 16, 3, 3)),
            torch.tensor([[0.0, 0.0, last_score]]),
        )
        sums = Packed(team, experts).add(team, x_MD, scores_ME, torch.zeros(1, 16))
        torch.testing.assert_close(sums, torch.full((1, 16), expected), rtol=1e-3, atol=0)
        assert torch.equal(multiply(x_MD, scores_ME, experts, DenseOps(0)), torch.full_like(x_MD, expected))


def test_of_equal_scores_the_lower_index_is_chosen_and_nan_is_chosen_last(team: Team) -> None:
    """Each expert adds its own index to the residual, times its weight."""
    shape = Shape(16, 16, 18, 3)
    x_MD, scores_ME = torch.ones(4, 16, dtype=torch.bfloat16), torch.zeros(4, 18)
    scores_ME[1, [5, 17]], scores_ME[2, 2:] = 50.0, float("nan")
    scores_ME[3] = float("nan")
    indices = torch.arange(18.0)
    scores_ME[0] = (indices % 4 == 1).float()
    experts = experts_that_give(indices.tolist(), shape)
    sums = Packed(team, experts).add(team, x_MD, scores_ME, torch.zeros(4, 16))
    assert torch.equal(sums[0], sums[0, :1].expand(16))
    torch.testing.assert_close(sums[:2, 0], torch.tensor([(1 + 5 + 9) / 3, (5 + 17) / 2]))
    assert sums[2:].isnan().all()
    chosen_MK = route(scores_ME, 3, is_normalized=True)[0]
    assert chosen_MK.tolist() == [[1, 5, 9], [5, 17, 0], [0, 1, 2], [0, 1, 2]]


def test_gate_and_up_are_clamped_and_nan_stays(team: Team) -> None:
    """Each expert gets its gate and up from its biases alone, and gives their product."""
    extremes = torch.tensor([-torch.inf, -1e30, -1.6, -1.5, 0.0, 1.5, 1.6, 1e30, torch.inf, torch.nan])
    gate_up_E2 = torch.cartesian_prod(extremes, extremes)
    num_experts = len(gate_up_E2)
    zeros = torch.zeros(32, 16, dtype=torch.bfloat16)
    down = DenseLinear(weight_NK=torch.full((16, 16), 1 / 16, dtype=torch.bfloat16), bias_N=None)

    def expert(gate_up_2: torch.Tensor) -> MlpWeights[Linear]:
        bias_N = gate_up_2.repeat_interleave(16)
        return MlpWeights(gate_up_proj=DenseLinear(weight_NK=zeros, bias_N=bias_N), down_proj=down)

    experts = replace(
        experts_of(Shape(16, 16, num_experts, 1, clamped=True)), experts=tuple(map(expert, gate_up_E2))
    )
    x_MD, scores_ME = torch.ones(num_experts, 16, dtype=torch.bfloat16), 1e4 * torch.eye(num_experts)
    actual = Packed(team, experts).add(team, x_MD, scores_ME, torch.zeros(num_experts, 16))
    expected = clamped_silu_mul(gate_up_E2, CLAMP.limit, CLAMP.alpha)
    torch.testing.assert_close(actual, expected.expand(-1, 16), rtol=2**-8, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("normalized", [False, True])
def test_weights_are_a_softmax_over_all_experts(normalized: bool) -> None:
    scores_TE = torch.randn(5, 12)
    chosen_TK, weights_TK = route(scores_TE, 4, is_normalized=normalized)
    best = scores_TE.softmax(-1).topk(4)
    assert torch.equal(chosen_TK, best.indices)
    total = best.values.sum(-1, keepdim=True) if normalized else 1.0
    torch.testing.assert_close(weights_TK, best.values / total)
