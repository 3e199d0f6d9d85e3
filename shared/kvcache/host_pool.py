"""The memory behind `HostPages`, and the copies between it and the KV pages of the device.

One host page is contiguous and holds all layers of one device page, K before V. On a GPU (`cuda_host_pool`) the
memory is pinned and copies are queued on the current stream. On a CPU a copy is done when `copy` returns. In both
cases `copy` is called on the forward stream only, behind the forwards that were launched before. So a page is
complete when it is read, and has no reader when it is written.
"""

from __future__ import annotations

from typing import Protocol

from shared.host_memory import new_host_buffer
from shared.kvcache.allocator import PageCopy
from shared.kvcache.cuda_host_pool import CudaHostKVPool, WindowedCudaHostKVPool
from shared.kvcache.pools import TokenToKVPool
from shared.kvcache.windowed_pool import AnyKVPool, WindowedKVPool


class HostKVPool(Protocol):
    """Host memory that KV pages are copied to."""

    def copy(self, pages: PageCopy) -> None:
        """Copy pages to the host or back. Called on the forward stream."""
        ...


class CpuHostKVPool:
    """The host pool of a KV pool that is in host memory itself (`--device cpu`)."""

    def __init__(
        self,
        pool: AnyKVPool,
        num_layers: int,
        num_host_pages: int,
        page_nbytes: int,
        num_window_layers: int = 0,
    ) -> None:
        """The last `num_window_layers` of `num_layers` are those of window pages."""
        self._pool = pool
        self._num_full, self._num_windows = num_layers - num_window_layers, num_window_layers
        self._window_at = page_nbytes // num_layers * self._num_full
        self._host_NB = new_host_buffer(num_host_pages * page_nbytes).view(num_host_pages, page_nbytes)

    def copy(self, pages: PageCopy) -> None:
        """Copy pages one by one. The copies are done on return."""
        move = self._pool.gather if pages.to_host else self._pool.scatter
        for device_page, host_page in zip(pages.device_pages, pages.host_pages, strict=True):
            if self._num_full:  # else the page is a name alone
                move([device_page], 0, self._num_full, self._host_NB[host_page, : self._window_at])
        for window_page, host_page in zip(pages.window_pages, pages.host_pages, strict=False):
            if window_page:
                at = self._window_at
                move([window_page], self._num_full, self._num_windows, self._host_NB[host_page, at:])


def make_host_pool(pool: AnyKVPool, num_host_pages: int) -> HostKVPool | None:
    """Host memory for `num_host_pages` pages of `pool`; None for 0. Raises RuntimeError when it cannot be pinned."""
    if num_host_pages == 0:
        return None
    if pool.device.type == "cuda":
        if isinstance(pool, TokenToKVPool):
            return CudaHostKVPool(pool, num_host_pages)
        full = CudaHostKVPool(pool.full, num_host_pages) if pool.full.num_layers else None
        return WindowedCudaHostKVPool(full, CudaHostKVPool(pool.window, num_host_pages))
    num_window_layers = sum(pool.has_window) if isinstance(pool, WindowedKVPool) else 0
    page_nbytes = pool.gather_nbytes(1, pool.num_layers)
    return CpuHostKVPool(pool, pool.num_layers, num_host_pages, page_nbytes, num_window_layers)
