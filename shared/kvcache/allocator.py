"""The free lists of KV pages, on the device and in host memory. Pages that a forward may still use are kept apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


class PageAllocator:
    """Hands out KV pages 1 .. num_pages - 1. Page 0 is a scratch page without an owner.

    The reuse rule. Forwards run in launch order. So a page that is freed while forward `n` is the last one launched
    may go to a *later forward* at once, which runs after `n`. A transfer writes from another thread or process, so
    it must wait until `n` is done. Therefore a freed page cools until every forward that was launched before the
    page was freed is retired. These are the epochs of epoch-based reclamation (Fraser 2004).

    The allocator is not thread-safe. It belongs to the scheduler thread.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs a page besides the scratch page"
        self.num_pages = num_pages - 1
        """Pages that can be handed out: all but the scratch page."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._cooling: deque[tuple[int, list[int]]] = deque()
        self._num_cooling = 0
        self._num_launched = 0
        self._num_retired = 0

    @property
    def num_free(self) -> int:
        """Pages that the next forward may take: cool ones and cooling ones."""
        return len(self._free) + self._num_cooling

    @property
    def num_free_for_arrivals(self) -> int:
        """Pages that a transfer may take: no launched forward uses them."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """Every free page, for the audit."""
        return [*self._free, *(page for _, pages in self._cooling for page in pages)]

    def alloc(self, num_pages: int) -> list[int] | None:
        """Take pages that only later forwards write. None when there are too few."""
        if num_pages > self.num_free:
            return None
        taken: list[int] = []
        while self._cooling and len(taken) < num_pages:
            _, pages = self._cooling[-1]
            while pages and len(taken) < num_pages:
                taken.append(pages.pop())
                self._num_cooling -= 1
            if not pages:
                self._cooling.pop()
        while len(taken) < num_pages:
            taken.append(self._free.pop())
        return taken

    def alloc_for_arrival(self, num_pages: int) -> list[int] | None:
        """Take pages that a transfer writes while forwards run. None when there are too few."""
        if num_pages > self.num_free_for_arrivals:
            return None
        return [self._free.pop() for _ in range(num_pages)]

    def free(self, page_ids: Iterable[int]) -> None:
        """Return pages to the free list. The caller must be their only owner."""
        pages = list(page_ids)
        if not pages:
            return
        if self._num_retired == self._num_launched:
            self._free.extend(pages)
            return
        self._cooling.append((self._num_launched, pages))
        self._num_cooling += len(pages)

    def forward_launched(self) -> None:
        """Count a forward that was handed to the stream. It may use every page that has an owner now."""
        self._num_launched += 1

    def forward_retired(self) -> None:
        """Count the oldest launched forward as done. It and its copies use no page from now on."""
        self._num_retired += 1
        assert self._num_retired <= self._num_launched
        while self._cooling and self._cooling[0][0] <= self._num_retired:
            _, pages = self._cooling.popleft()
            self._num_cooling -= len(pages)
            self._free.extend(pages)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copies device page `device_pages[i]` (all layers, K and V) to host page `host_pages[i]`, or back.

    Of a model with windows, its layers are those of `device_pages[i]` and, unless that is 0, of `window_pages[i]`.
    """

    to_host: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    window_pages: tuple[int, ...] = ()


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
