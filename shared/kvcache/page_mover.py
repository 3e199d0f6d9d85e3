"""Copies KV pages in host memory between their pool and a contiguous buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class PageMover(Protocol):
    """Gathers and scatters pages. Several data threads call it at the same time.

    `pages_RPN` is a pool in host memory, uint8: R rows (K or V of one layer) of P pages of N bytes. The other tensor
    of a copy is contiguous uint8 [len(rows), len(page_ids), N], viewed in any shape.
    """

    @property
    def name(self) -> str:
        """The name in the log."""
        ...

    def gather(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], out: torch.Tensor
    ) -> None:
        """out[r, i] = pages_RPN[rows[r], page_ids[i]]. Raises IndexError for a page that is not there."""
        ...

    def scatter(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], src: torch.Tensor
    ) -> None:
        """pages_RPN[rows[r], page_ids[i]] = src[r, i]. Raises IndexError for a page that is not there."""
        ...


class NumpyPageMover:
    """Runs on every machine: one memcpy for each page. It is the slow twin of `NativePageMover`.

    torch's `index_select` and `index_copy_` copy word by word, which is as fast to read and far slower to write.
    """

    name = "numpy"

    def gather(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], out: torch.Tensor
    ) -> None:
        """Copy pages into the contiguous `out`."""
        pages, into = _as_pages(pages_RPN, rows, page_ids, out)
        np.take(pages, page_ids, axis=1, out=into, mode="clip")  # any other mode copies twice

    def scatter(
        self, pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], src: torch.Tensor
    ) -> None:
        """Copy the contiguous `src` into pages."""
        pages, source = _as_pages(pages_RPN, rows, page_ids, src)
        pages[:, page_ids] = source


def _as_pages(
    pages_RPN: torch.Tensor, rows: range, page_ids: Sequence[int], slot: torch.Tensor
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Views of the pool and of the slot whose items are whole pages."""
    _, num_pages, page_nbytes = pages_RPN.shape
    if not all(0 <= page < num_pages for page in page_ids):
        raise IndexError(f"of pages {page_ids} one is not of these {num_pages}")
    page = np.dtype((np.void, page_nbytes))
    pages = pages_RPN.numpy()[rows.start : rows.stop].view(page)[:, :, 0]
    return pages, slot.view(-1).numpy().view(page).reshape(len(rows), len(page_ids))
