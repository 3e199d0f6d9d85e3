"""Pages of host memory that keep the KV of retracted requests: who owns which. Bounded, and needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Device page `device_pages[i]` (all layers, K and V) goes to host page `host_pages[i]`, or comes from it."""

    to_host: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class HostPages:
    """Hands out host pages 0 .. num_pages - 1.

    Nothing cools here, unlike in `PageAllocator`: host pages are read and written on the forward stream alone, so
    whoever gets a page next touches it after those who had it before.

    Not thread-safe: it belongs to the scheduler thread.
    """

    def __init__(self, num_pages: int = 0, page_nbytes: int = 0) -> None:
        self.num_pages = num_pages
        self.page_nbytes = page_nbytes
        """Bytes of one page: all layers, K and V."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that keep somebody's KV."""
        return len(self._held)

    def alloc(self, num_pages: int) -> list[int] | None:
        """Take pages, or None when there are too few. In rising order: neighbours are copied in one go."""
        if num_pages > len(self._free):
            return None
        taken = sorted(self._free.pop() for _ in range(num_pages))
        self._held.update(taken)
        return taken

    def free(self, page_ids: Iterable[int]) -> None:
        """Give pages back; copies that were launched may still use them."""
        for page in page_ids:
            self._held.remove(page)  # a KeyError: freed twice
            self._free.append(page)

    def free_pages(self) -> list[int]:
        """Every page that nobody owns, for the audit."""
        return list(self._free)
