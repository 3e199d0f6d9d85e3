"""Who may write to which page: free lists, with pages that a running forward may still name kept apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PageAllocator:
    """Hands out KV pages 1 .. num_pages - 1; page 0 is a scratch page that nobody owns.

    The reuse rule. Forwards run in launch order, so a page freed while forward `n` was the last one launched
    may be given at once to a *later forward*: it runs after `n`. Anyone else (a transfer that writes from
    another thread or process) must wait until `n` is done. Freed pages therefore cool until every forward
    that was launched before they were freed is retired: the epochs of epoch-based reclamation (Fraser 2004).

    Not thread-safe: it belongs to the scheduler thread.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs a page besides the scratch page"
        self.num_pages = num_pages - 1
        """Pages that can be handed out."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._cooling: deque[tuple[int, list[int]]] = deque()
        self._num_cooling = 0
        self._num_launched = 0
        self._num_retired = 0

    @property
    def num_free(self) -> int:
        """Pages that the next forward may take."""
        return len(self._free) + self._num_cooling

    @property
    def num_free_for_arrivals(self) -> int:
        """Pages that no launched forward names."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """Every page that nobody owns, for the audit."""
        return [*self._free, *(page for _, pages in self._cooling for page in pages)]

    def alloc(self, num_pages: int) -> list[int] | None:
        """Take pages that only later forwards will write; None when there are too few."""
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
        """Take pages that a transfer will write while forwards run; None when there are too few."""
        if num_pages > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_pages)]

    def free(self, page_ids: Iterable[int]) -> None:
        """Give pages back. The caller must be their only owner."""
        pages = list(page_ids)
        if not pages:
            return
        if self._num_retired == self._num_launched:
            self._free.extend(pages)
            return
        self._cooling.append((self._num_launched, pages))
        self._num_cooling += len(pages)

    def forward_launched(self) -> None:
        """A forward was handed to the stream; it names every page that is owned now."""
        self._num_launched += 1

    def forward_retired(self) -> None:
        """The oldest launched forward is done: it and its copies touch no page any more."""
        self._num_retired += 1
        assert self._num_retired <= self._num_launched
        while self._cooling and self._cooling[0][0] <= self._num_retired:
            _, pages = self._cooling.popleft()
            self._num_cooling -= len(pages)
            self._free.extend(pages)
