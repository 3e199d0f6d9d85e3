"""Packed linear layers against float64, within the bound of a float32 sum in any order.

k products, exact in float32, are summed with k roundings at most (u = 2^-24), so the error is at most
k u / (1 - k u) times the sum of their magnitudes; one more rounding for the bias, and one of bf16 (2^-8) for the
output.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, silu

from shared.kernels.cpu.build import FLAGS, NativeUnavailable, find_compiler
from shared.kernels.cpu.library import SRC, Team
from shared.kernels.cpu.linear import PanelArena, pack_rows
from tests.kernels.cpu.linear import (
    PackedLinear,
    dense,
    linear,
    linear_add,
    linear_float,
    linear_gelu_mul,
    linear_silu_mul,
)

U = 2.0**-24
BF16 = 2.0**-8


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int
    bias: bool = False

    def __str__(self) -> str:
        return f"m{self.m}-n{self.n}-k{self.k}" + "-bias" * self.bias


SHAPES = [
    Shape(1, 64, 2),
    Shape(1, 130, 96, bias=True),
    Shape(2, 16, 34),
    Shape(5, 62, 128, bias=True),
    Shape(7, 130, 96),
    Shape(13, 192, 62, bias=True),
    Shape(33, 66, 320),
    Shape(3, 66, 1090),  # two chunks of k, and half of k is odd
    Shape(401, 24, 2048, bias=True),  # several blocks of rows
    Shape(0, 64, 32),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Case:
    """Random x, weight and bias of a shape, with the float64 result and the bound of a float32 sum's error."""

    def __init__(self, team: Team, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x_MK = torch.randn(shape.m, shape.k, generator=generator).bfloat16()
        self.w_NK = torch.randn(shape.n, shape.k, generator=generator).bfloat16()
        self.bias_N = torch.randn(shape.n, generator=generator) if shape.bias else None
        wide_x, wide_w = self.x_MK.double(), self.w_NK.double()
        bias = torch.zeros(1) if self.bias_N is None else self.bias_N
        self.y_MN = wide_x @ wide_w.T + bias
        magnitudes_MN = wide_x.abs() @ wide_w.abs().T
        self.bound_MN = shape.k * U / (1 - shape.k * U) * magnitudes_MN + 2 * U * self.y_MN.abs()
        self.shape = shape

    def packed(self, team: Team) -> PackedLinear:
        return dense(team, self.w_NK, self.bias_N)

    def packed_gate_up(self, team: Team) -> PackedLinear:
        return dense(team, self.w_NK, self.bias_N, is_gate_up=True)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    excess = (actual.double() - expected.double()).abs() - bound
    assert not (excess > 0).any() and not actual.isnan().any(), f"beyond its bound by {excess.max()}"


@shapes
def test_the_three_ways_to_store(team: Team, shape: Shape) -> None:
    case = Case(team, shape)
    packed = case.packed(team)
    y = linear_float(team, case.x_MK, packed)
    assert y.dtype == torch.float32
    assert_within(y, case.y_MN, case.bound_MN)
    rounded = linear(team, case.x_MK, packed)
    assert rounded.dtype == torch.bfloat16
    assert_within(rounded, case.y_MN, case.bound_MN + BF16 * (case.y_MN.abs() + case.bound_MN))
    residual_MN = torch.randn(shape.m, shape.n)
    total_MN = residual_MN + case.y_MN
    linear_add(team, case.x_MK, packed, residual_MN)
    assert_within(residual_MN, total_MN, case.bound_MN + U * (total_MN.abs() + case.bound_MN))


GATES = {"silu": (linear_silu_mul, silu), "gelu": (linear_gelu_mul, partial(gelu, approximate="tanh"))}


@shapes
@pytest.mark.parametrize("name", GATES)
def test_linear_gated_mul(team: Team, shape: Shape, name: str) -> None:
    gated_mul, function = GATES[name]
    case = Case(team, shape)
    (gate, up), (gate_bound, up_bound) = case.y_MN.chunk(2, -1), case.bound_MN.chunk(2, -1)
    y = gated_mul(team, case.x_MK, case.packed_gate_up(team))
    expected = function(gate) * up
    # Slopes are at most 1.13; the functions' own arithmetic, exp included, is good to 2^-20.
    sums = 1.13 * gate_bound * (up.abs() + up_bound) + function(gate).abs() * up_bound
    assert_within(y, expected, sums + (2.0**-20 + BF16) * (expected.abs() + sums))


@pytest.mark.parametrize("name", GATES)
def test_gated_mul_of_extremes(team: Team, name: str) -> None:
    """A gate far below zero closes, one far above passes everything."""
    gated_mul, function = GATES[name]
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e30])
    x_MK = torch.tensor([[1.0, 0.0]]).bfloat16()
    gate_up = torch.cat([torch.stack([gates, gates], 1), torch.ones(9, 2)]).bfloat16()
    y = gated_mul(team, x_MK, dense(team, gate_up, is_gate_up=True))
    expected = function(gates.bfloat16().double())[None]
    assert_within(y, expected, 2 * BF16 * expected.abs() + 1e-37)


@pytest.mark.parametrize("k", [64, 66, 1090])
def test_a_row_has_the_same_bits_in_any_batch_and_team(library: ctypes.CDLL, k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x_MK = torch.randn(70, k, generator=generator).bfloat16()
    w_NK = torch.randn(192, k, generator=generator).bfloat16()
    teams = [Team(library, [0]), Team(library, [0, 0])]
    w, gate_up = dense(teams[0], w_NK), dense(teams[0], w_NK, is_gate_up=True)
    whole, whole_silu_mul = linear_float(teams[0], x_MK, w), linear_silu_mul(teams[0], x_MK, gate_up)
    try:
        for m in range(1, 71):
            for team in teams:
                assert torch.equal(linear_float(team, x_MK[70 - m :], w), whole[70 - m :])
                assert torch.equal(linear_silu_mul(team, x_MK[:m], gate_up), whole_silu_mul[:m])
    finally:
        for team in teams:
            team.close()


@pytest.mark.parametrize("rows", [(64, 64, 64), (32, 16, 16), (40, 7, 81)])
def test_parts_of_a_weight_share_panels(team: Team, rows: tuple[int, ...]) -> None:
    """As q, k and v do; each comes from a view with rows of its own stride, and leaves its neighbours alone."""
    k = 34
    w_NK = torch.randn(sum(rows), k).bfloat16()
    whole, of_parts = dense(team, w_NK).panels, PanelArena().new_panels(len(w_NK), 2 * k)
    first = 0
    for part in torch.split(w_NK, rows):
        wider = torch.full((len(part), k + 10), 99.0, dtype=torch.bfloat16)
        wider[:, 4 : 4 + k] = part
        pack_rows(team, wider[:, 4 : 4 + k], of_parts, first)
        first += len(part)
    assert torch.equal(of_parts, whole)
    rows = whole.transpose(1, 2).reshape(-1, 2 * k)
    assert torch.equal(rows[: len(w_NK)], w_NK.view(torch.uint8))
    assert not rows[len(w_NK) :].any()


def test_a_weight_may_be_larger_than_what_is_reserved_at_once() -> None:
    arena = PanelArena()
    assert [arena.new_panels(n, 64).shape[0] for n in (64, 1 << 21, 64)] == [1, 1 << 15, 1]


@pytest.mark.parametrize("source", ["linear", "extend_attention"])
def test_amx_code_assembles_to_tile_instructions(tmp_path: Path, source: str) -> None:
    """This needs a compiler and an assembler that know AMX, not a CPU that has it."""
    target = "-march=sapphirerapids"
    flags = [target if flag == "-march=native" else flag for flag in FLAGS] + ["-O1"]
    try:
        compiler = [find_compiler(), *flags]
    except NativeUnavailable as e:
        pytest.skip(f"NO NATIVE KERNELS: {e}")
    probe = subprocess.run([*compiler, "-E", "-x", "c++", "/dev/null"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip(f"THIS COMPILER KNOWS NO AMX: {probe.stderr.decode()}")
    assembly = tmp_path / f"{source}.s"
    subprocess.run([*compiler, "-S", str(SRC / f"{source}.cpp"), "-o", str(assembly)], check=True)
    subprocess.run([*compiler, "-c", str(assembly), "-o", str(tmp_path / "assembled.o")], check=True)
    tiles = "ldtilecfg|tileloadd|tdpbf16ps|tilestored|tilerelease" + "|tdpbsud" * (source == "linear")
    used = set(re.findall(rf"^\s+({tiles})", assembly.read_text(), re.M))
    assert used == set(tiles.split("|"))
