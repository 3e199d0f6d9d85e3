"""Native gather and scatter of KV pages in host memory, without the GIL; `NumpyPageMover` is the slow twin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.kernels.cpu.build import open_library

_SOURCE = Path(__file__).parent / "src" / "pages.cpp"
_ARGUMENTS = (ctypes.c_void_p, *(ctypes.c_int64,) * 3, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)

Pages = npt.NDArray[np.void]


class NativePageMover:
    """See PageMover in shared.kvcache.page_mover. A library of its own, since it asks nothing of the CPU.

    Raises NativeUnavailable.
    """

    name = "native"

    def __init__(self) -> None:
        library = open_library("pages", [_SOURCE])
        self._gather, self._scatter = library.baton_gather_pages, library.baton_scatter_pages
        for function in (self._gather, self._scatter):
            function.restype, function.argtypes = ctypes.c_bool, _ARGUMENTS

    def gather(self, pages: Pages, page_ids: Sequence[int], out: Pages) -> None:
        """See PageMover."""
        _call(self._gather, pages, page_ids, out)

    def scatter(self, pages: Pages, page_ids: Sequence[int], src: Pages) -> None:
        """See PageMover."""
        _call(self._scatter, pages, page_ids, src)


def _call(function: ctypes._NamedFuncPointer, pages: Pages, page_ids: Sequence[int], slot: Pages) -> None:
    assert pages.flags.c_contiguous and slot.flags.c_contiguous
    assert slot.shape == (len(pages), len(page_ids)) and slot.itemsize == pages.itemsize
    ids = np.asarray(page_ids, dtype=np.int64)
    if not function(
        pages.ctypes.data, *pages.shape, pages.itemsize, ids.ctypes.data, len(ids), slot.ctypes.data
    ):
        raise IndexError(f"of pages {page_ids} one is not of these {pages.shape[1]}")
