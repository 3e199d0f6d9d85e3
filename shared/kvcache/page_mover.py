"""Copying KV pages in host memory between their pool and a contiguous buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.void]
"""Each item is one whole page, of K or of V of one layer."""


class PageMover(Protocol):
    """Called on data threads, several at a time."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    def gather(self, pages: Pages, page_ids: Sequence[int], out: Pages) -> None:
        """out[row, i] = pages[row, page_ids[i]]. IndexError: there is no such page."""
        ...

    def scatter(self, pages: Pages, page_ids: Sequence[int], src: Pages) -> None:
        """pages[row, page_ids[i]] = src[row, i]. IndexError: there is no such page."""
        ...


class NumpyPageMover:
    """What every machine can do, and the slow twin of the native one. One memcpy a page.

    torch's `index_select` and `index_copy_` go word by word: about as fast to read, far slower to write.
    """

    name = "numpy"

    def gather(self, pages: Pages, page_ids: Sequence[int], out: Pages) -> None:
        """See PageMover."""
        if not all(0 <= page < pages.shape[1] for page in page_ids):
            raise IndexError(f"of pages {page_ids} one is not of these {pages.shape[1]}")
        np.take(pages, page_ids, axis=1, out=out, mode="clip")  # any other mode copies twice

    def scatter(self, pages: Pages, page_ids: Sequence[int], src: Pages) -> None:
        """See PageMover."""
        if not all(0 <= page < pages.shape[1] for page in page_ids):
            raise IndexError(f"of pages {page_ids} one is not of these {pages.shape[1]}")
        pages[:, page_ids] = src
