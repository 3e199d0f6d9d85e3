"""Copies KV pages between their pool and a contiguous buffer, and takes the digest of what was copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from shared.device_streams import DeviceStreams, GatherUnderWay
from shared.kvcache.page_digest import chunk_digest


class PageMover(Protocol):
    """Gathers and scatters pages. Several data threads call it at the same time.

    `pages_RPN` is a pool, uint8: R rows (K or V of one layer) of P pages of N bytes. The other tensor of a copy is
    contiguous uint8 [len(rows), len(page_ids), N], viewed in any shape. With a `seed`, a copy returns the
    `chunk_digest` of the bytes that it copied, in slices of N bytes; without one, 0. A copy that has returned or
    raised touches no memory any more, unless it returned a GatherUnderWay.
    """

    @property
    def name(self) -> str:
        """The name in the log."""
        ...

    def gather(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        out: torch.Tensor,
        seed: int | None = None,
    ) -> int | GatherUnderWay:
        """out[r, i] = pages_RPN[rows[r], page_ids[i]]. Raises IndexError for a page that is not there."""
        ...

    def scatter(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        src: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """pages_RPN[rows[r], page_ids[i]] = src[r, i]. Raises IndexError for a page that is not there."""
        ...


class TorchPageMover:
    """Runs on every machine, and is the slow twin of the others. Without `streams`, pages are in host memory.

    Else they are in device memory, and the other tensor of a copy is on the same device, or in pinned host memory. A
    copy runs on the stream of the calling thread, which waits for it, also when the copy raises half-way: then its
    pages and its slot go to others.
    """

    name = "torch"

    def __init__(self, streams: DeviceStreams | None = None) -> None:
        self._streams = streams

    def gather(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        out: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """Copy pages into the contiguous `out`. The digest is of the pages, not of what `out` holds."""
        with self._waiting():
            pages_RPW = _as_words(pages_RPN)[rows.start : rows.stop]
            picked = pages_RPW.index_select(1, _ids(page_ids, pages_RPN)).view(torch.uint8)
            out.view(-1).copy_(picked.view(-1))
            return 0 if seed is None else chunk_digest(picked, pages_RPN.shape[2], seed)

    def scatter(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        src: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """Copy the contiguous `src` into pages. The digest is of the pages after that, not of `src`."""
        with self._waiting():
            pages_RPW, ids = _as_words(pages_RPN)[rows.start : rows.stop], _ids(page_ids, pages_RPN)
            arrived = src.to(pages_RPN.device).view(-1).view(pages_RPW.dtype)
            pages_RPW.index_copy_(1, ids, arrived.view(len(rows), len(ids), pages_RPW.shape[2]))
            if seed is None:
                return 0
            written = pages_RPW.index_select(1, ids).view(torch.uint8)
            return chunk_digest(written, pages_RPN.shape[2], seed)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """At the end of the `with` block nothing that it queued is left to run."""
        try:
            yield
        finally:
            if self._streams is not None:
                self._streams.current().synchronize()


def _as_words(pages_RPN: torch.Tensor) -> torch.Tensor:
    """The same pages in the largest words that fit: indexing moves one at a time."""
    return pages_RPN.view(torch.int64) if pages_RPN.shape[2] % 8 == 0 else pages_RPN


def _ids(page_ids: Sequence[int], pages_RPN: torch.Tensor) -> torch.Tensor:
    num_pages = pages_RPN.shape[1]
    if not all(0 <= page < num_pages for page in page_ids):
        raise IndexError(f"of pages {page_ids} one is not of these {num_pages}")
    return torch.tensor(page_ids, dtype=torch.int64).to(pages_RPN.device)
