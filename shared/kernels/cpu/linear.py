"""Packs the weights of linear layers for the native kernels. `src/linear.h` describes the layout.

Shape suffixes: N outputs, K inputs (even), R rows of a weight, F = N / 2 of a fused gate and up projection.
"""

from __future__ import annotations

import torch

from shared.host_memory import reserve_host_memory
from shared.kernels.cpu.library import Team

PANEL = 64  # output columns of a panel: kPanel of src/linear.h
_CHUNK_NBYTES = 64 << 20


class PanelArena:
    """Memory for the panels of a model, one weight after the other, so that nearly all of it is in huge pages.

    If each weight had an allocation of its own, its ends would be in small pages, which stream at two thirds of the
    rate.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def new_panels(self, n: int, k: int) -> torch.Tensor:
        """Return zeroed panels for `n` outputs of `k` inputs. They become resident when they are packed."""
        assert n > 0 and k > 0 and k % 2 == 0
        shape = (-(-n // PANEL), k // 2, PANEL, 2)
        nbytes = 2 * shape[0] * PANEL * k
        if len(self._rest) < nbytes:
            self._rest = reserve_host_memory(max(nbytes, _CHUNK_NBYTES))
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken.view(torch.bfloat16).view(shape)


def pack_rows(team: Team, weight_RK: torch.Tensor, panels: torch.Tensor, first_column: int = 0) -> None:
    """Pack R rows of a weight, bf16 with any row stride, into columns [first_column, first_column + R)."""
    _check_weight(weight_RK, panels)
    rows, k = weight_RK.shape
    assert 0 <= first_column <= len(panels) * PANEL - rows
    team.library.baton_pack_linear(
        team.handle, weight_RK.data_ptr(), rows, k, weight_RK.stride(0), panels.data_ptr(), first_column
    )


def pack_gate_up(team: Team, gate_FK: torch.Tensor, up_FK: torch.Tensor, panels: torch.Tensor) -> None:
    """Pack gate and up for `linear_silu_mul`: a panel holds 32 columns of gate, then the same 32 columns of up."""
    for is_up, weight_FK in enumerate((gate_FK, up_FK)):
        _check_weight(weight_FK, panels)
        rows, k = weight_FK.shape
        assert len(panels) == -(-2 * rows // PANEL)
        team.library.baton_pack_gate_up(
            team.handle, weight_FK.data_ptr(), rows, k, weight_FK.stride(0), panels.data_ptr(), is_up
        )


def _check_weight(weight_RK: torch.Tensor, panels: torch.Tensor) -> None:
    assert weight_RK.dtype == panels.dtype == torch.bfloat16 and panels.is_contiguous()
    assert weight_RK.shape[1] == 2 * panels.shape[1] and weight_RK.stride(1) == 1
