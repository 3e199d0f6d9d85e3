"""Copying KV pages in host memory between their pool and a contiguous buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class PageMover(Protocol):
    """Called on data threads, several at a time.

    `pages_RPN` is a pool in host memory, uint8: N bytes make a page, of K or of V of one layer, and each of the R
    rows has P of them. The other end of a copy is contiguous uint8 [len(rows), len(page_ids), N], of any shape.
    """

    @property
    def name(self) -> str:
        """For the log."""
        ...

    def gather(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], out: torch.Tensor
    ) -> None:
        """out[r, i] = pages_RPN[rows[r], page_ids[i]]. IndexError: there is no such page."""
        ...

    def scatter(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], src: torch.Tensor
    ) -> None:
        """pages_RPN[rows[r], page_ids[i]] = src[r, i]. IndexError: there is no such page."""
        ...


class NumpyPageMover:
    """What every machine can do, and the slow twin of the native one. One memcpy a page.

    torch's `index_select` and `index_copy_` go word by word: about as fast to read, far slower to write.
    """

    name = "numpy"

    def gather(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], out: torch.Tensor
    ) -> None:
        """See PageMover."""
        pages, into = _opaque(pages_RPN, rows, page_ids, out)
        np.take(pages, page_ids, axis=1, out=into, mode="clip")  # any other mode copies twice

    def scatter(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], src: torch.Tensor
    ) -> None:
        """See PageMover."""
        pages, source = _opaque(pages_RPN, rows, page_ids, src)
        pages[:, page_ids] = source


def _opaque(
    pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], slot: torch.Tensor
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Pool and slot with whole pages for items."""
    _, num_pages, page_nbytes = pages_RPN.shape
    if not all(0 <= page < num_pages for page in page_ids):
        raise IndexError(f"of pages {page_ids} one is not of these {num_pages}")
    page = np.dtype((np.void, page_nbytes))
    pages = pages_RPN.numpy()[rows.start : rows.stop].view(page)[:, :, 0]
    return pages, slot.view(-1).numpy().view(page).reshape(len(rows), len(page_ids))
