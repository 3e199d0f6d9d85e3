"""The native linear layers as Python calls: y = x W^T + bias.

Shape suffixes: M rows of x, N outputs, K inputs, G groups of K, F = N / 2 of a fused gate and up projection. A row's
result is the same bits in any batch and for a team of any size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from shared.kernels.cpu.library import Team
from shared.model.linear import DenseLinear, Linear, QuantizedLinear
from shared.model.packed_weights import Packer
from tests.kernels.cpu.prototypes import kernel

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class CodesDesc(ctypes.Structure):
    """`Codes` of src/quantize.h."""

    _fields_ = (
        ("values", _Pointer),
        ("scales", _Pointer),
        ("sums", _Pointer),
        ("k", _Int),
        ("group", _Int),
        ("order", _Pointer),
    )


class RowsDesc(ctypes.Structure):
    """`Rows` of src/linear.h."""

    _fields_ = (("values", _Pointer), ("codes", CodesDesc))


@dataclass(frozen=True)
class Codes:
    """Rows of x as codes [M, K], int8, with scales [M, G] and sums [M, G]."""

    values_MK: torch.Tensor
    scales_MG: torch.Tensor
    sums_MG: torch.Tensor
    desc: CodesDesc

    @classmethod
    def empty(cls, m: int, k: int, group: int, order: int | None = None) -> Codes:
        tensors = (
            torch.empty(m, k, dtype=torch.int8),
            torch.empty(m, k // group),
            torch.empty(m, k // group, dtype=torch.int32),
        )
        return cls(*tensors, CodesDesc(*(tensor.data_ptr() for tensor in tensors), k, group, order))


class PackedLinear:
    """A linear layer as the decoder packs it."""

    def __init__(self, team: Team, linear: Linear, *, is_gate_up: bool = False) -> None:
        self._packer = Packer(team)
        self.desc = self._packer.linear(linear, is_gate_up=is_gate_up)
        self.n, self.k = linear.shape
        self.order_K = linear.order_K if isinstance(linear, QuantizedLinear) else None
        self.panels = next(
            kept for kept in self._packer.kept if isinstance(kept, torch.Tensor) and kept.dim() == 4
        )


def dense(
    team: Team, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, *, is_gate_up: bool = False
) -> PackedLinear:
    """A bf16 weight."""
    return PackedLinear(team, DenseLinear(weight_NK=weight_NK, bias_N=bias_N), is_gate_up=is_gate_up)


def quantize(team: Team, x_MK: torch.Tensor, group: int, order: int | None = None) -> Codes:
    """bf16 rows as codes."""
    codes = Codes.empty(len(x_MK), x_MK.shape[1], group, order)
    kernel(team, "baton_quantize")(team.handle, x_MK.data_ptr(), len(x_MK), ctypes.addressof(codes.desc))
    return codes


def linear(team: Team, x_MK: torch.Tensor, w: PackedLinear) -> torch.Tensor:
    """[M, N] in bf16."""
    return _multiply(team, "baton_linear", x_MK, w, x_MK.new_empty(len(x_MK), w.n))


def linear_float(team: Team, x_MK: torch.Tensor, w: PackedLinear) -> torch.Tensor:
    """[M, N] in float32."""
    return _multiply(team, "baton_linear_float", x_MK, w, x_MK.new_empty(len(x_MK), w.n, dtype=torch.float32))


def linear_add(team: Team, x_MK: torch.Tensor, w: PackedLinear, residual_MN: torch.Tensor) -> None:
    """Add the result to `residual_MN`, float32."""
    assert _is_float32(residual_MN, len(x_MK), w.n)
    _multiply(team, "baton_linear_add", x_MK, w, residual_MN)


def linear_silu_mul(team: Team, x_MK: torch.Tensor, w: PackedLinear) -> torch.Tensor:
    """silu(gate) * up, [M, F] in bf16, of a layer packed as gate and up; the bias is the gate's, then the up's."""
    assert w.n % 2 == 0
    return _multiply(team, "baton_linear_silu_mul", x_MK, w, x_MK.new_empty(len(x_MK), w.n // 2))


def linear_gelu_mul(team: Team, x_MK: torch.Tensor, w: PackedLinear) -> torch.Tensor:
    """The same of gelu(gate), with GELU's approximation by tanh."""
    assert w.n % 2 == 0
    return _multiply(team, "baton_linear_gelu_mul", x_MK, w, x_MK.new_empty(len(x_MK), w.n // 2))


def _multiply(
    team: Team, function: str, x_MK: torch.Tensor, w: PackedLinear, out: torch.Tensor
) -> torch.Tensor:
    assert x_MK.dtype == torch.bfloat16 and x_MK.is_contiguous() and x_MK.shape[1] == w.k
    in_order_MK = x_MK if w.order_K is None else x_MK[:, w.order_K].contiguous()
    rows = RowsDesc(in_order_MK.data_ptr())
    if w.desc.bits < 16 and not w.desc.weight_only:
        codes = quantize(team, x_MK, w.desc.group, w.desc.order)
        rows = RowsDesc(None, codes.desc)
    kernel(team, function)(
        team.handle, ctypes.addressof(rows), len(x_MK), ctypes.addressof(w.desc), out.data_ptr()
    )
    return out


def _is_float32(tensor: torch.Tensor, *shape: int) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.shape == shape
