"""The native linear layers as Python calls: y = x W^T + bias with float32 sums.

Shape suffixes: M rows of x, N outputs, K inputs (even), F = N / 2 of a fused gate and up projection. A row's result
is the same bits in any batch and for a team of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernels.cpu.library import Team
from shared.kernels.cpu.linear import PANEL
from tests.kernels.cpu.prototypes import kernel


@dataclass(frozen=True)
class PackedLinear:
    """Weights as src/linear.h lays them out, [ceil(n / 64), k / 2, 64, 2]; `bias_N` is float32."""

    panels: torch.Tensor
    bias_N: torch.Tensor | None
    n: int
    k: int

    def __post_init__(self) -> None:
        assert (
            self.panels.shape == (-(-self.n // PANEL), self.k // 2, PANEL, 2) and self.panels.is_contiguous()
        )
        assert self.panels.dtype == torch.bfloat16
        assert self.bias_N is None or _is_float32(self.bias_N, self.n)


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
    """silu(gate) * up, [M, F] in bf16, of weights from `pack_gate_up`; the bias is the gate's, then the up's."""
    assert w.n % 2 == 0
    return _multiply(team, "baton_linear_silu_mul", x_MK, w, x_MK.new_empty(len(x_MK), w.n // 2))


def _multiply(
    team: Team, function: str, x_MK: torch.Tensor, w: PackedLinear, out: torch.Tensor
) -> torch.Tensor:
    assert x_MK.dtype == torch.bfloat16 and x_MK.is_contiguous() and x_MK.shape[1] == w.k
    bias = None if w.bias_N is None else w.bias_N.data_ptr()
    kernel(team, function)(
        team.handle, x_MK.data_ptr(), len(x_MK), w.panels.data_ptr(), bias, w.n, w.k, out.data_ptr()
    )
    return out


def _is_float32(tensor: torch.Tensor, *shape: int) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.shape == shape
