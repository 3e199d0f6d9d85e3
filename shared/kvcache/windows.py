"""The KV pages of the layers with a sliding window, each named by the page of the other layers that it belongs to.

A window page belongs to the owner of its page, and is given up before it (ADR 49). Of a page of the RadixCache it is
`protected` while a request or a loan sees it through its window, and `evictable` otherwise.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shared.kvcache.allocator import PageAllocator
from shared.protocol.messages import first_window_page


class WindowPages:
    """Which page has which window page. It belongs to the scheduler thread; a forward works on a snapshot.

    `window` is the longest one of all layers, in tokens.
    """

    def __init__(self, num_pages: int, num_window_pages: int, window: int, page_size: int) -> None:
        """Both numbers count the scratch page 0."""
        self.window = window
        self.page_size = page_size
        self.allocator = PageAllocator(num_window_pages)
        self.of_page = np.zeros(num_pages, dtype=np.int32)
        """The window page of each page; 0 for none."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever a hit may be longer or shorter than before."""
        self._num_readers: Counter[int] = Counter()
        """How many requests and loans see each protected page of the tree."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Pages of the tree whose window pages may be evicted, in that order."""

    @property
    def num_available(self) -> int:
        """Window pages that a forward can get: free or evictable ones."""
        return self.allocator.num_free + self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Window pages of the tree that no request sees."""
        return len(self._evictable)

    @property
    def num_protected(self) -> int:
        """Window pages of the tree that a request sees."""
        return len(self._num_readers)

    def first_page(self, num_tokens: int) -> int:
        """The first page whose window page is kept behind `num_tokens` tokens (`first_window_page`)."""
        return first_window_page(num_tokens, self.window, self.page_size)

    def hit(self, pages: Sequence[int]) -> int:
        """How many of `pages`, a cached prefix, can be continued: the window before the end of those is whole."""
        has_P = self.of_page[np.asarray(pages, dtype=np.int64)] != 0
        numbers_P = np.arange(1, len(has_P) + 1)
        missing_P = np.maximum.accumulate(
            np.where(has_P, 0, numbers_P)
        )  # number of the last page without one
        first_P = np.maximum(numbers_P * self.page_size + 1 - self.window, 0) // self.page_size
        usable = np.nonzero(missing_P <= first_P)[0]
        return int(usable[-1]) + 1 if len(usable) else 0

    def num_evictable_of(self, pages: Iterable[int]) -> int:
        """How many of `pages` have an evictable window page."""
        return sum(page in self._evictable for page in pages)

    # ------------------------------------------------------------------------------- in and out
    def make_room(self, num_pages: int, *, num_live: int | None = None) -> bool:
        """Evict until `take` finds so many window pages. False when there are too few.

        With `num_live`, they are for a transfer. `KVLedger.grow_for_arrival` says what is evicted then.
        """
        if num_pages > self.num_available:
            return False
        allocator = self.allocator
        if num_live is None:
            self._evict(num_pages - allocator.num_free)
            return True
        if num_pages > allocator.num_free_for_arrivals:
            self._evict(num_pages + num_live - allocator.num_free)
        return num_pages <= allocator.num_free_for_arrivals

    def take(self, pages: Sequence[int], *, for_arrival: bool) -> None:
        """Give each of `pages`, which have none, a window page. `make_room` has found them."""
        alloc = self.allocator.alloc_for_arrival if for_arrival else self.allocator.alloc
        window_pages = alloc(len(pages))
        assert window_pages is not None, "there was room a moment ago"
        self.of_page[pages] = window_pages

    def release(self, pages: Sequence[int]) -> None:
        """Free the window pages of `pages`, which no request sees, as far as they have any."""
        if not pages:
            return
        for page in pages:
            assert page not in self._num_readers, f"page {page} is given up while a request sees it"
            self._evictable.pop(page, None)
        ids = self.of_page[pages]
        self.of_page[pages] = 0
        self.allocator.free(ids[ids != 0].tolist())

    def enter_tree(self, own: Sequence[int], of_tree: Sequence[int]) -> None:
        """Note that the RadixCache has `of_tree` in the place of the pages `own` of a request.

        A page that the tree had already takes the window page of the request's, if it has lost its own.
        """
        for mine, page in zip(own, of_tree, strict=True):
            if mine != page and not self.of_page[page] and self.of_page[mine]:
                self.of_page[page], self.of_page[mine] = self.of_page[mine], 0
                self.on_change()
            elif mine != page:
                continue
            if self.of_page[page]:
                self._evictable[page] = None

    def read(self, pages: Iterable[int]) -> None:
        """Protect the window pages of `pages` of the tree."""
        for page in pages:
            assert self.of_page[page], f"page {page} has no window page"
            self._evictable.pop(page, None)
            self._num_readers[page] += 1

    def unread(self, pages: Iterable[int], *, first: bool = False) -> None:
        """Undo one `read`. `first`: what no request sees any more is evicted before all others."""
        for page in pages:
            self._num_readers[page] -= 1
            if not self._num_readers[page]:
                del self._num_readers[page]
                self._evictable[page] = None
                if first:
                    self._evictable.move_to_end(page, last=False)

    def num_readers(self, page: int) -> int:
        """How many requests and loans see a page of the tree."""
        return self._num_readers[page]

    def _evict(self, num_pages: int) -> None:
        if num_pages <= 0:
            return
        pages = [page for page, _ in zip(self._evictable, range(num_pages), strict=False)]
        self.release(pages)
        self.on_change()

    def audit(self, free: set[int], tree: set[int]) -> str | None:
        """What is wrong with the window pages, given the free pages and those of the tree; None: nothing."""
        named = Counter(self.of_page[self.of_page != 0].tolist())
        owners = named + Counter(self.allocator.free_pages())
        every = set(range(1, self.allocator.num_pages + 1))
        if set(owners) != every or any(count > 1 for count in owners.values()):
            doubled = sorted(page for page, count in owners.items() if count > 1)
            return f"window pages with two owners {doubled}, with none {sorted(every - set(owners))}"
        if stray := sorted(page for page in free if self.of_page[page]):
            return f"free pages {stray} have window pages"
        seen = set(self._num_readers)
        if not seen <= tree:
            return f"pages {sorted(seen - tree)} are protected and not of the tree"
        evictable = {page for page in tree - seen if self.of_page[page]}
        if evictable != set(self._evictable):
            return f"evictable window pages are miscounted: {sorted(evictable ^ set(self._evictable))}"
        if blind := sorted(page for page in seen if not self.of_page[page]):
            return f"protected pages {blind} have no window pages"
        return None
