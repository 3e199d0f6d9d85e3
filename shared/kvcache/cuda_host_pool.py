"""Pinned host memory, and the copies between it and the KV pages of a GPU (see `host_pool`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shared.kvcache.allocator import PageCopy
from shared.kvcache.pools import TokenToKVPool

MAX_CHUNK_BYTES = 32 << 20
"""Most device memory that one copy on a GPU allocates. Requests are retracted when that memory is scarce."""


class CudaHostKVPool:
    """The host pool of a KV pool on a GPU. Pages are packed on the device. Neighbours cross the bus in one copy."""

    def __init__(self, pool: TokenToKVPool, num_host_pages: int) -> None:
        self._pool = pool
        self._page_nbytes = pool.gather_nbytes(1, pool.num_layers)
        nbytes = num_host_pages * self._page_nbytes
        self._host_NB = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).view(
            num_host_pages, self._page_nbytes
        )

    def copy(self, pages: PageCopy) -> None:
        """Queue the copies on the current stream."""
        chunk = max(MAX_CHUNK_BYTES // self._page_nbytes, 1)
        for first in range(0, len(pages.host_pages), chunk):
            part = slice(first, first + chunk)
            ids_N = (
                torch.tensor(pages.device_pages[part]).pin_memory().to(self._pool.device, non_blocking=True)
            )
            if pages.to_host:
                self._to_host(ids_N, pages.host_pages[part])
            else:
                self._to_device(ids_N, pages.host_pages[part])

    def _to_host(self, ids_N: torch.Tensor, host_pages: Sequence[int]) -> None:
        packed_NB = self._device_pages().index_select(0, ids_N).view(len(ids_N), -1).view(torch.uint8)
        for at, host, length in runs(host_pages):
            self._host_NB[host : host + length].copy_(packed_NB[at : at + length], non_blocking=True)

    def _to_device(self, ids_N: torch.Tensor, host_pages: Sequence[int]) -> None:
        packed_NB = torch.empty((len(ids_N), self._page_nbytes), dtype=torch.uint8, device=self._pool.device)
        for at, host, length in runs(host_pages):
            packed_NB[at : at + length].copy_(self._host_NB[host : host + length], non_blocking=True)
        device_pages = self._device_pages()
        shape = (len(ids_N), *device_pages.shape[1:])
        device_pages.index_copy_(0, ids_N, packed_NB.view(self._pool.dtype).view(shape))

    def _device_pages(self) -> torch.Tensor:
        """A view of the pool as [pages, layers * 2, num_kv_heads, page_size, head_dim]."""
        return self._pool.buffer_LSNHPD.flatten(0, 1).transpose(0, 1)


@dataclass(frozen=True)
class WindowedCudaHostKVPool:
    """The host pools of both groups of layers of a `WindowedKVPool` on a GPU."""

    full: CudaHostKVPool | None
    """None where every layer has a window."""
    window: CudaHostKVPool

    def copy(self, pages: PageCopy) -> None:
        """Queue the copies on the current stream."""
        if self.full is not None:
            self.full.copy(pages)
        named = [
            (window_page, host_page)
            for window_page, host_page in zip(pages.window_pages, pages.host_pages, strict=True)
            if window_page
        ]
        if named:
            self.window.copy(PageCopy(pages.to_host, *zip(*named, strict=True)))


def runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the maximal runs of neighbours in `ids`, as (index of the first id, first id, length)."""
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield start, ids[start], i - start
            start = i
