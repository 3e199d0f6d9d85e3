"""Native gather and scatter of KV pages in host memory, without the GIL. `NumpyPageMover` is the slow twin."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch

from shared.kernels.cpu.build import open_library

_SOURCE = Path(__file__).parent / "src" / "pages.cpp"
_ARGUMENTS = (ctypes.c_void_p, *(ctypes.c_int64,) * 3, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


class NativePageMover:
    """A PageMover in C++. It has a library of its own, since it needs no AVX-512. Raises NativeUnavailable."""

    name = "native"

    def __init__(self) -> None:
        library = open_library("pages", [_SOURCE])
        self._gather, self._scatter = library.baton_gather_pages, library.baton_scatter_pages
        for function in (self._gather, self._scatter):
            function.restype, function.argtypes = ctypes.c_bool, _ARGUMENTS

    def gather(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], out: torch.Tensor
    ) -> None:
        """Copy pages into the contiguous `out`."""
        _call(self._gather, pages_RPN, rows, page_ids, out)

    def scatter(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], src: torch.Tensor
    ) -> None:
        """Copy the contiguous `src` into pages."""
        _call(self._scatter, pages_RPN, rows, page_ids, src)


def _call(
    function: ctypes._NamedFuncPointer,
    pages_RPN: torch.Tensor,
    rows: range,
    page_ids: Sequence[int],
    slot: torch.Tensor,
) -> None:
    # `array` instead of numpy: this runs for every chunk, and making numpy views took longer than all other lines.
    num_rows, num_pages, page_nbytes = pages_RPN.shape
    ids = array("q", page_ids)
    assert pages_RPN.is_contiguous() and 0 <= rows.start <= rows.stop <= num_rows and rows.step == 1
    assert slot.is_contiguous() and slot.nbytes == len(rows) * len(ids) * page_nbytes
    first_row = pages_RPN.data_ptr() + rows.start * num_pages * page_nbytes
    ids_address, num_ids = ids.buffer_info()
    if not function(first_row, len(rows), num_pages, page_nbytes, ids_address, num_ids, slot.data_ptr()):
        raise IndexError(f"of pages {page_ids} one is not of these {num_pages}")
