"""Native gather and scatter of KV pages in host memory, without the GIL. `TorchPageMover` is the slow twin."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch

from shared.kernels.cpu.build import open_library

_SRC = Path(__file__).parent / "src"
_ARGUMENTS = (
    *(ctypes.c_void_p, *(ctypes.c_int64,) * 3),
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
)


class NativePageMover:
    """A PageMover in C++. It has a library of its own, since it needs no AVX2. Raises NativeUnavailable."""

    name = "native"

    def __init__(self) -> None:
        library = open_library("pages", [_SRC / "pages.cpp"], [_SRC / "page_digest.h"])
        self._gather, self._scatter = library.baton_gather_pages, library.baton_scatter_pages
        for function in (self._gather, self._scatter):
            function.restype, function.argtypes = ctypes.c_bool, _ARGUMENTS

    def gather(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        out: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """Copy pages into the contiguous `out`. Returns its digest."""
        return _call(self._gather, pages_RPN, rows, page_ids, out, seed)

    def scatter(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        src: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """Copy the contiguous `src` into pages. Returns the digest of what was written, whatever `src` is later."""
        return _call(self._scatter, pages_RPN, rows, page_ids, src, seed)


def _call(
    function: ctypes._NamedFuncPointer,
    pages_RPN: torch.Tensor,
    rows: range,
    page_ids: Sequence[int],
    slot: torch.Tensor,
    seed: int | None,
) -> int:
    # `array` instead of numpy: this runs for every chunk, and making numpy views took longer than all other lines.
    num_rows, num_pages, page_nbytes = pages_RPN.shape
    ids = array("q", page_ids)
    assert pages_RPN.is_contiguous() and 0 <= rows.start <= rows.stop <= num_rows and rows.step == 1
    assert slot.is_contiguous() and slot.nbytes == len(rows) * len(ids) * page_nbytes
    first_row = pages_RPN.data_ptr() + rows.start * num_pages * page_nbytes
    digest = array("Q", () if seed is None else (seed,))
    where = (first_row, len(rows), num_pages, page_nbytes, *ids.buffer_info(), slot.data_ptr())
    if not function(*where, digest.buffer_info()[0] if digest else None):
        raise IndexError(f"of pages {page_ids} one is not of these {num_pages}")
    return digest[0] if digest else 0
