"""Quantized linear layers against their definition in plain torch: the same integers, so nearly the same floats."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import silu

from shared.kernels.cpu.library import Team
from shared.kernels.row_codes import quantize_rows
from shared.model.linear import QuantizedLinear, in_groups
from tests.kernels.cpu.linear import (
    Codes,
    PackedLinear,
    linear,
    linear_add,
    linear_float,
    linear_silu_mul,
    quantize,
)
from tests.kernels.cpu.prototypes import kernel
from tests.kernels.cpu.test_linear import BF16, U, assert_within


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int
    bits: int
    group: int
    zeros: bool = False
    bias: bool = False
    order: bool = False
    weight_only: bool = False
    fp4: bool = False

    def __str__(self) -> str:
        flags = "-zeros" * self.zeros + "-bias" * self.bias + "-order" * self.order
        flags += "-weight-only" * self.weight_only + "-fp4" * self.fp4
        return f"m{self.m}-n{self.n}-k{self.k}-w{self.bits}g{self.group}{flags}"


OF_BOTH = [
    Shape(1, 64, 4, 8, 4),
    Shape(1, 130, 96, 8, 96, bias=True),
    Shape(2, 16, 8, 4, 8),
    Shape(3, 66, 320, 8, 64, zeros=True),
    Shape(5, 62, 128, 4, 32, bias=True),
    Shape(7, 130, 96, 4, 96, zeros=True),
    Shape(13, 192, 72, 4, 24, zeros=True, bias=True, order=True),
    Shape(33, 66, 320, 8, 320, order=True),
    Shape(301, 24, 2048, 8, 2048, bias=True),  # several blocks of rows
    Shape(301, 24, 2048, 4, 128, zeros=True),
    Shape(0, 64, 32, 8, 32),
    *(Shape(m, 130, 320, 4, 32, bias=True, fp4=True) for m in (1, 2, 6, 9, 301)),
]
SHAPES = [replace(shape, weight_only=weight_only) for weight_only in (False, True) for shape in OF_BOTH]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def layer_of(shape: Shape, seed: int = 7) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(seed)

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 1 << shape.bits, size, generator=generator, dtype=torch.uint8)

    num_groups = shape.k // shape.group
    return QuantizedLinear(
        codes_NK=codes(shape.n, shape.k),
        bits=shape.bits,
        scales_NG=torch.rand(shape.n, num_groups, generator=generator) + 0.1
        if not shape.fp4
        else torch.randint(-9, 4, (shape.n, num_groups), generator=generator).float().exp2(),
        zeros_NG=codes(shape.n, num_groups) if shape.zeros else None,
        order_K=torch.randperm(shape.k, generator=generator) if shape.order else None,
        bias_N=torch.randn(shape.n, generator=generator) if shape.bias else None,
        is_weight_only=shape.weight_only,
        is_float=shape.fp4,
    )


def rows_of(shape: Shape) -> torch.Tensor:
    return torch.randn(shape.m, shape.k, generator=torch.Generator().manual_seed(3)).bfloat16()


def expected_of(layer: QuantizedLinear, x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float32, and how far float32 sums over groups, or over inputs, may be from it."""
    y_MN = layer.multiply(x_MK.float())
    magnitude_MN = x_MK.float().abs() @ layer.dequantized().abs().T
    summands = layer.shape[1] if layer.is_weight_only else layer.scales_NG.shape[1]
    return y_MN, 4 * (summands + 2) * U * (magnitude_MN + y_MN.abs()) + 1e-30


@shapes
def test_the_four_ways_to_store(team: Team, shape: Shape) -> None:
    layer, x_MK = layer_of(shape), rows_of(shape)
    packed, (y_MN, bound_MN) = PackedLinear(team, layer), expected_of(layer, x_MK)
    assert_within(linear_float(team, x_MK, packed), y_MN, bound_MN)
    assert_within(linear(team, x_MK, packed), y_MN, bound_MN + BF16 * (y_MN.abs() + bound_MN))
    residual_MN = torch.randn(shape.m, shape.n)
    total_MN = residual_MN + y_MN
    linear_add(team, x_MK, packed, residual_MN)
    assert_within(residual_MN, total_MN, bound_MN + 2 * U * (total_MN.abs() + bound_MN))
    gate, up = y_MN.chunk(2, -1)
    gate_bound, up_bound = bound_MN.chunk(2, -1)
    sums = 1.1 * gate_bound * (up.abs() + up_bound) + silu(gate).abs() * up_bound
    y_MF = linear_silu_mul(team, x_MK, PackedLinear(team, layer, is_gate_up=True))
    product = silu(gate) * up
    assert_within(y_MF, product, sums + (2.0**-20 + BF16) * (product.abs() + sums) + 1e-30)


def test_integers_are_exact_up_to_the_largest(team: Team) -> None:
    """All products have one sign and the largest size, at the most inputs of a group."""
    k = 65_536
    weights = torch.full((64, k), 255, dtype=torch.uint8)
    zeros = torch.zeros(64, 1, dtype=torch.uint8)
    layer = QuantizedLinear(codes_NK=weights, bits=8, scales_NG=torch.ones(64, 1), zeros_NG=zeros)
    x_MK = torch.full((2, k), -1.0, dtype=torch.bfloat16)
    y = linear_float(team, x_MK, PackedLinear(team, layer))
    sums = torch.tensor(-127 * 255 * k, dtype=torch.int32).float()
    assert torch.equal(y, (sums * (torch.ones(1) / 127)).expand(2, 64))
    assert torch.equal(layer.multiply(x_MK.float()), y)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(70, 192, 96, 8, 96),
        Shape(70, 192, 256, 4, 32, zeros=True),
        Shape(70, 192, 640, 8, 640, weight_only=True),
        Shape(70, 192, 256, 4, 32, zeros=True, weight_only=True),
        Shape(70, 192, 256, 4, 32, fp4=True),
        Shape(70, 192, 256, 4, 32, fp4=True, weight_only=True),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_batch_and_team(library: ctypes.CDLL, shape: Shape) -> None:
    x_MK, layer = rows_of(shape), layer_of(shape)
    teams = [Team(library, [0]), Team(library, [0, 0])]
    packed, gate_up = PackedLinear(teams[0], layer), PackedLinear(teams[0], layer, is_gate_up=True)
    whole, whole_silu_mul = linear_float(teams[0], x_MK, packed), linear_silu_mul(teams[0], x_MK, gate_up)
    try:
        for m in range(1, 71):
            for team in teams:
                assert torch.equal(linear_float(team, x_MK[70 - m :], packed), whole[70 - m :])
                assert torch.equal(linear_silu_mul(team, x_MK[:m], gate_up), whole_silu_mul[:m])
    finally:
        for team in teams:
            team.close()


@pytest.mark.parametrize(("k", "group"), [(4, 4), (96, 96), (320, 32), (72, 24), (4096, 4096)])
def test_codes_of_rows_are_those_of_the_definition(team: Team, k: int, group: int) -> None:
    x_MK = torch.randn(9, k).bfloat16()
    x_MK[1], x_MK[2, :4] = 0.0, torch.tensor([1e38, -1e38, 1e-38, 0.0])
    x_MK[3], x_MK[3, ::2] = 62.5, 127.0  # ties
    x_MK[4], x_MK[5], x_MK[6, 1] = x_MK[4] * 1e-33, x_MK[5] * 1e-38, float("-inf")
    codes_MGK, scales_MG = quantize_rows(in_groups(x_MK, group))
    codes = quantize(team, x_MK, group)
    assert torch.equal(codes.values_MK, codes_MGK.flatten(1)) and torch.equal(codes.scales_MG, scales_MG)
    assert torch.equal(
        codes.sums_MG, codes_MGK.flatten(1).int().unflatten(1, (-1, group)).sum(2, dtype=torch.int32)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("bits", "weight_only"), [(8, False), (4, False), (4, True)])
def test_a_row_that_is_not_finite_gives_nothing_finite(
    team: Team, bits: int, weight_only: bool, bad: float
) -> None:
    shape = Shape(3, 64, 64, bits, 32, weight_only=weight_only)
    x_MK = rows_of(shape)
    x_MK[1, 40] = bad
    y = linear_float(team, x_MK, PackedLinear(team, layer_of(shape)))
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()
    assert not layer_of(shape).multiply(x_MK)[1].isfinite().any()


@pytest.mark.parametrize("group", [96, 32])
def test_the_norm_gives_the_codes_of_its_float32_result(team: Team, group: int) -> None:
    x, weight, order = torch.randn(5, 96), torch.randn(96), torch.randperm(96, dtype=torch.int32)
    normed = torch.empty(5, 96, dtype=torch.bfloat16)
    kernel(team, "baton_rms_norm")(
        team.handle, x.data_ptr(), 5, 96, weight.data_ptr(), 1e-5, normed.data_ptr()
    )
    for of in (None, order):
        codes = Codes.empty(5, 96, group, None if of is None else of.data_ptr())
        address = ctypes.addressof(codes.desc)
        kernel(team, "baton_rms_norm_codes")(
            team.handle, x.data_ptr(), 5, 96, weight.data_ptr(), 1e-5, address
        )
        values = codes.values_MK.unflatten(1, (-1, group)) * codes.scales_MG[..., None]
        wanted = normed.float() if of is None else normed.float()[:, of.long()]
        assert_within(values.flatten(1), wanted, codes.scales_MG.amax(1)[:, None] / 2 + BF16 * wanted.abs())
        assert torch.equal(
            codes.sums_MG, codes.values_MK.int().unflatten(1, (-1, group)).sum(2, dtype=torch.int32)
        )


def test_the_definition_is_near_the_dense_product() -> None:
    for shape in (Shape(9, 40, 256, 8, 256, bias=True), Shape(9, 40, 256, 4, 32, zeros=True, order=True)):
        layer, x_MK = layer_of(shape), rows_of(shape).float()
        dense = x_MK @ layer.dequantized().T + (0 if layer.bias_N is None else layer.bias_N)
        error = (layer.multiply(x_MK) - dense).abs() / dense.std()
        assert error.mean() < 0.02
        if layer.order_K is not None:
            assert (replace(layer, order_K=None).multiply(x_MK) - dense).abs().mean() / dense.std() > 0.5


def test_the_definition_adds_up_the_largest_codes_exactly() -> None:
    """More inputs than float32 adds up exactly: 4096 * 127 * 255 has 27 bits."""
    generator = torch.Generator().manual_seed(0)
    codes_NK = torch.randint(200, 256, (7, 4096), generator=generator, dtype=torch.uint8)
    zeros_NG = torch.zeros(7, 1, dtype=torch.uint8)
    linear = QuantizedLinear(codes_NK=codes_NK, bits=8, scales_NG=torch.ones(7, 1), zeros_NG=zeros_NG)
    x_TK = torch.randint(100, 128, (5, 4096), generator=generator)
    x_TK[:, 0] = 127  # so that the scale is 1 and the codes are x
    assert torch.equal(linear.multiply(x_TK.float()), (x_TK @ codes_NK.long().T).float())
