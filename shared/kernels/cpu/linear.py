"""Packs the weights of linear layers for the native kernels. `src/linear.h` describes the layout.

Shape suffixes: N outputs, K inputs, R rows of a weight, F = N / 2 of a fused gate and up projection, G groups of K,
P panels, B bytes of the K of a row, a multiple of 4.
"""

from __future__ import annotations

import torch

from shared.host_memory import new_mapping, reserve_host_memory
from shared.kernels.cpu.library import Team

PANEL = 64  # output columns of a panel: kPanel of src/linear.h
UNIT_NBYTES = 4
_CHUNK_NBYTES = 64 << 20


class PanelArena:
    """Memory for the panels of a model, one weight after the other, so that nearly all of it is in huge pages.

    If each weight had an allocation of its own, its ends would be in small pages, which stream at two thirds of the
    rate.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def new_panels(self, n: int, row_nbytes: int) -> torch.Tensor:
        """Return zeroed panels [P, B / 4, 64, 4], uint8, for `n` outputs. Packing makes them resident."""
        assert n > 0 and row_nbytes > 0 and row_nbytes % UNIT_NBYTES == 0
        shape = (-(-n // PANEL), row_nbytes // UNIT_NBYTES, PANEL, UNIT_NBYTES)
        nbytes = shape[0] * PANEL * row_nbytes
        if len(self._rest) < nbytes:
            self._rest = reserve_host_memory(max(nbytes, _CHUNK_NBYTES))
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken.view(shape)


def pack_rows(team: Team, weight_RB: torch.Tensor, panels: torch.Tensor, first_column: int = 0) -> None:
    """Pack R rows of a weight, bf16 or bytes with any row stride, into columns [first_column, first_column + R)."""
    rows, units, stride = _units_of(weight_RB, panels)
    assert 0 <= first_column <= len(panels) * PANEL - rows
    team.library.baton_pack_linear(
        team.handle, weight_RB.data_ptr(), rows, units, stride, panels.data_ptr(), first_column
    )


def pack_gate_up(team: Team, gate_FB: torch.Tensor, up_FB: torch.Tensor, panels: torch.Tensor) -> None:
    """Pack gate and up for `linear_silu_mul`: a panel holds 32 columns of gate, then the same 32 columns of up."""
    for is_up, weight_FB in enumerate((gate_FB, up_FB)):
        rows, units, stride = _units_of(weight_FB, panels)
        assert len(panels) == -(-2 * rows // PANEL)
        team.library.baton_pack_gate_up(
            team.handle, weight_FB.data_ptr(), rows, units, stride, panels.data_ptr(), is_up
        )


def nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits as bytes [N, K / 2]: of eight codes, the first four are the lower halves of four bytes."""
    n, k = codes_NK.shape
    packed_NB = new_mapping(n * k // 2).view(n, k // 2)  # goes back to the system when it is freed
    packed_NU = packed_NB.view(torch.int32)  # four at a time: no code has bits to shift into the next one
    lower_NU, upper_NU = codes_NK.view(torch.int32).view(n, k // 8, 2).unbind(2)
    torch.bitwise_left_shift(upper_NU, 4, out=packed_NU)
    packed_NU |= lower_NU
    return packed_NB


def middle_exchanged(codes_NK: torch.Tensor) -> torch.Tensor:
    """Of each four codes in a row the second and third exchanged, which `src/linear_weight_only.h` reads as pairs."""
    n, k = codes_NK.shape
    out_NK = new_mapping(n * k).view(n, k)
    out_NK.view(n, k // 4, 2, 2).copy_(codes_NK.reshape(n, k // 4, 2, 2).transpose(2, 3))
    return out_NK


def in_panels(values_NG: torch.Tensor, *, is_gate_up: bool = False) -> torch.Tensor:
    """Values of outputs in the order of panels, [P, G, 64]; those of columns past N are 0."""
    parts = values_NG.chunk(2) if is_gate_up else (values_NG,)
    width = PANEL // len(parts)
    num_panels = -(-len(parts[0]) // width)
    padded = [torch.nn.functional.pad(part, (0, 0, 0, num_panels * width - len(part))) for part in parts]
    columns_PCG = torch.cat([part.reshape(num_panels, width, -1) for part in padded], dim=1)
    return columns_PCG.transpose(1, 2).contiguous()


def _units_of(weight_RB: torch.Tensor, panels: torch.Tensor) -> tuple[int, int, int]:
    """Rows of a weight, units of a row, and units from row to row."""
    row_nbytes, stride_nbytes = (x * weight_RB.itemsize for x in (weight_RB.shape[1], weight_RB.stride(0)))
    assert panels.dtype == torch.uint8 and panels.is_contiguous() and weight_RB.stride(1) == 1
    assert row_nbytes == panels.shape[1] * UNIT_NBYTES and stride_nbytes % UNIT_NBYTES == 0
    return len(weight_RB), row_nbytes // UNIT_NBYTES, stride_nbytes // UNIT_NBYTES
