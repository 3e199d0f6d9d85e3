"""The free list of host pages, which keep the KV of retracted requests. This file does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copies device page `device_pages[i]` (all layers, K and V) to host page `host_pages[i]`, or back."""

    to_host: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class HostPages:
    """Hands out host pages 0 .. num_pages - 1.

    A host page need not cool as in `PageAllocator`. Host pages are read and written on the forward stream alone, so
    the copies of a page's next owner run after those of its last owner.

    The class is not thread-safe. It belongs to the scheduler thread.
    """

    def __init__(self, num_pages: int = 0, page_nbytes: int = 0) -> None:
        self.num_pages = num_pages
        self.page_nbytes = page_nbytes
        """Bytes of one page, all layers, K and V."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that keep the KV of a request."""
        return len(self._held)

    def alloc(self, num_pages: int) -> list[int] | None:
        """Take pages, in rising order, so that neighbours are copied together. None when there are too few."""
        if num_pages > len(self._free):
            return None
        taken = sorted(self._free.pop() for _ in range(num_pages))
        self._held.update(taken)
        return taken

    def free(self, page_ids: Iterable[int]) -> None:
        """Return pages to the free list. Copies that were launched before may still use them."""
        for page in page_ids:
            self._held.remove(page)  # raises KeyError for a page that is freed twice
            self._free.append(page)

    def free_pages(self) -> list[int]:
        """Every free page, for the audit."""
        return list(self._free)
