"""Linear layers over packed bf16 weights: y = x W^T + bias with float32 sums.

Shape suffixes: M rows of x, N outputs, K inputs (even), F = N / 2 of a fused gate and up projection. A row's result
is the same bits in any batch and for a team of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.host_memory import reserve_host_memory
from shared.kernels.cpu.library import Team

PANEL = 64  # output columns; kPanel of src/linear.h
_CHUNK_NBYTES = 64 << 20


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


class PanelArena:
    """Room for the panels of a model, one weight behind the other, so that almost all of it lies in huge pages.

    Weights one by one would leave the ends of each in small pages, which stream at two thirds of the rate.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def new_panels(self, n: int, k: int) -> torch.Tensor:
        """Panels of zeros for `n` outputs of `k` inputs; nothing is resident until it is packed."""
        assert n > 0 and k > 0 and k % 2 == 0
        shape = (-(-n // PANEL), k // 2, PANEL, 2)
        nbytes = 2 * shape[0] * PANEL * k
        if len(self._rest) < nbytes:
            self._rest = reserve_host_memory(max(nbytes, _CHUNK_NBYTES))
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken.view(torch.bfloat16).view(shape)


def pack_rows(team: Team, weight_RK: torch.Tensor, panels: torch.Tensor, first_column: int = 0) -> None:
    """Put R rows of a weight, bf16 with any stride between rows, into columns [first_column, first_column + R)."""
    _check_weight(weight_RK, panels)
    rows, k = weight_RK.shape
    assert 0 <= first_column <= len(panels) * PANEL - rows
    team.library.baton_pack_linear(
        team.handle, weight_RK.data_ptr(), rows, k, weight_RK.stride(0), panels.data_ptr(), first_column
    )


def pack_gate_up(team: Team, gate_FK: torch.Tensor, up_FK: torch.Tensor, panels: torch.Tensor) -> None:
    """Interleave gate and up for `linear_silu_mul`: a panel holds 32 columns of gate, then their 32 of up."""
    for is_up, weight_FK in enumerate((gate_FK, up_FK)):
        _check_weight(weight_FK, panels)
        rows, k = weight_FK.shape
        assert len(panels) == -(-2 * rows // PANEL)
        team.library.baton_pack_gate_up(
            team.handle, weight_FK.data_ptr(), rows, k, weight_FK.stride(0), panels.data_ptr(), is_up
        )


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
    getattr(team.library, function)(
        team.handle, x_MK.data_ptr(), len(x_MK), w.panels.data_ptr(), bias, w.n, w.k, out.data_ptr()
    )
    return out


def _check_weight(weight_RK: torch.Tensor, panels: torch.Tensor) -> None:
    assert weight_RK.dtype == panels.dtype == torch.bfloat16 and panels.is_contiguous()
    assert weight_RK.shape[1] == 2 * panels.shape[1] and weight_RK.stride(1) == 1


def _is_float32(tensor: torch.Tensor, *shape: int) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.shape == shape
