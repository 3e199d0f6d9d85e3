"""The KV that each request holds. A page changes its owner in this file only.

A page has one owner at any time: the allocator (free), the RadixCache (evictable, or protected while a request reads
it), or one request (held). The row of a request in the page table is divided into

    [ pages of the tree, locked        | pages of its own                        ]
    0                       num_tree_pages                             num_pages

and its tokens into

    [ computed and committed   | used by a launched forward | allocated, unused ]
    0            kv_committed_len              kv_allocated_len    num_pages * page_size

Of a model with sliding windows, pages [window_from, num_pages) of a row have window pages, which belong to the owner
of the page (`WindowPages`). Of a request's own pages, no other one has any.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.kvcache.allocator import HostPages, PageAllocator
from shared.kvcache.pools import ReqToTokenPool
from shared.kvcache.radix_cache import Match, Peek, PrefixLock, RadixCache
from shared.kvcache.windows import WindowPages


@dataclass(eq=False, slots=True)
class ReqKV:
    """The KV of one request, from `KVLedger.admit` to `KVLedger.cache_finished_req`.

    `row` is SGLang's req_pool_idx. The pages of a forward's new tokens are SGLang's out_cache_loc.
    """

    row: int
    extra_key: str
    lock: PrefixLock
    num_tree_pages: int
    num_pages: int
    kv_committed_len: int
    kv_allocated_len: int
    num_found_pages: int
    """Pages of the request that the tree had already when it came, or that others have put there meanwhile."""
    superseded: list[int] = field(default_factory=list)
    """Pages of the request that the tree has too. The row names the tree's. A transfer may still read these."""
    window_from: int = 0
    """The first page of the row that has a window page, and that no other request can take."""
    keeps_windows: bool = False
    """Whether a transfer reads its window pages, so that none is given up."""


@dataclass(frozen=True, slots=True)
class PageCount:
    """Pages by owner. The first four add up to `total`."""

    free: int
    evictable: int
    protected: int
    held: int
    total: int


@dataclass(frozen=True, slots=True)
class Room:
    """Pages and window pages that there are, or that are needed."""

    pages: int
    window_pages: int

    def __add__(self, other: Room) -> Room:
        return Room(self.pages + other.pages, self.window_pages + other.window_pages)

    def __sub__(self, other: Room) -> Room:
        return Room(self.pages - other.pages, self.window_pages - other.window_pages)

    def holds(self, needed: Room) -> bool:
        """Whether so much is there."""
        return needed.pages <= self.pages and needed.window_pages <= self.window_pages


@dataclass(eq=False, slots=True)
class TentativeKV:
    """The KV of a `with KVLedger.tentative` block. It is released at the block's end unless `keep` was called."""

    kv: ReqKV | None
    """None when every row is taken."""
    kept: bool = False

    def keep(self) -> ReqKV:
        """Return the KV, which the caller owns from now on."""
        assert self.kv is not None
        self.kept = True
        return self.kv


class KVLedger:
    """Pages and rows of one node. The ledger belongs to the scheduler thread."""

    def __init__(
        self,
        allocator: PageAllocator,
        rows: ReqToTokenPool,
        radix_cache: RadixCache,
        *,
        keep_prefixes: bool = True,
        host: HostPages | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        """`windows`, which `radix_cache` has too, are those of a model whose layers with windows have a pool."""
        self.allocator = allocator
        self.rows = rows
        self.radix_cache = radix_cache
        self.page_size = rows.page_size
        self.keep_prefixes = keep_prefixes
        self.host = host or HostPages()
        self.windows = windows
        self.live: dict[int, ReqKV] = {}

    @property
    def available(self) -> Room:
        """What a forward can get: free or evictable pages. Window pages are never short in a model that has none."""
        return Room(
            self.allocator.num_free + self.radix_cache.num_evictable_pages,
            sys.maxsize if self.windows is None else self.windows.num_available,
        )

    @property
    def num_available_pages(self) -> int:
        """Pages that a forward can get, each with a window page."""
        available = self.available
        return min(available.pages, available.window_pages)

    @property
    def num_pages_with_windows(self) -> int:
        """So many pages can have window pages at a time: all pages in a model without windows."""
        num_pages = self.allocator.num_pages
        return num_pages if self.windows is None else min(num_pages, self.windows.allocator.num_pages)

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

    def first_window_page(self, num_tokens: int) -> int:
        """The first page whose window page is kept behind `num_tokens` tokens; 0 for a model without windows."""
        return 0 if self.windows is None else self.windows.first_page(num_tokens)

    def window_pages_of(self, pages: Sequence[int]) -> tuple[int, ...]:
        """The window page of each page, 0 for none; empty for a model without windows."""
        return () if self.windows is None else tuple(self.windows.of_page[pages].tolist())

    def growth(self, lens: Iterable[int], nums_more: Sequence[int]) -> Room:
        """What sequences of `lens` tokens need to grow by `nums_more`, one token at a time."""
        windows = 0 if self.windows is None else sum(map(self.window_growth, lens, nums_more))
        return Room(self.pages_for(sum(nums_more)), windows)

    def window_growth(self, num_tokens: int, num_more: int) -> int:
        """Window pages that a sequence of `num_tokens` tokens needs for `num_more` behind them, one token at a time.

        A window that slides has one page more until the forward that filled it is committed.
        """
        windows = self.windows
        if windows is None:
            return 0
        before, after = (
            self.pages_for(end) - windows.first_page(end) for end in (num_tokens, num_tokens + num_more)
        )
        return min(max(after - before, 0) + 1, self.pages_for(num_more))

    def match_prefix(self, ids: Sequence[int], extra_key: str) -> Match:
        """Match all of `ids` but the last token, which a forward must compute. The match counts as a use."""
        return self.radix_cache.match_prefix(ids[: len(ids) - 1], extra_key)

    def peek_prefix(self, ids: Sequence[int], extra_key: str) -> Peek:
        """Return where `match_prefix` would end. The tree does not change, and the peek does not count as a use."""
        return self.radix_cache.peek(ids, len(ids) - 1, extra_key)

    def num_pages_released_by(self, kvs: Sequence[ReqKV]) -> int:
        """Count the pages that would become available if all these requests ended now."""
        own = sum(kv.num_pages - kv.num_tree_pages + len(kv.superseded) for kv in kvs)
        return own + self.radix_cache.num_pages_unlocked_by(kv.lock for kv in kvs)

    def released_by(self, kvs: Sequence[ReqKV]) -> Room:
        """What would become available if all these requests ended now."""
        pages, windows = self.num_pages_released_by(kvs), self.windows
        if windows is None:
            return Room(pages, 0)
        own = sum(len(self._own_windows(kv)) for kv in kvs)
        seen = Counter(page for kv in kvs for page in self._tree_windows(kv))
        return Room(pages, own + sum(count == windows.num_readers(page) for page, count in seen.items()))

    def held_only_by(self, kvs: Sequence[ReqKV], peek: Peek, num_tokens: int) -> Room:
        """What of the peeked prefix counts as available if all these requests ended now.

        Of window pages, those that a request of `num_tokens` tokens sees.
        """
        pages = self.radix_cache.num_pages_held_only_by((kv.lock for kv in kvs), peek)
        windows = self.windows
        if windows is None:
            return Room(pages, 0)
        seen = Counter(page for kv in kvs for page in self._tree_windows(kv))
        prefix = self.radix_cache.pages_of(peek, windows.first_page(num_tokens))
        return Room(pages, sum(seen[page] == windows.num_readers(page) for page in prefix))

    def num_windows_to_protect(self, prefix: Peek) -> int:
        """How many window pages are evictable, and are not once a request goes on behind `prefix`."""
        windows = self.windows
        if windows is None:
            return 0
        first = windows.first_page(prefix.num_pages * self.page_size)
        return windows.num_evictable_of(self.radix_cache.pages_of(prefix, first))

    def admit(self, match: Match, extra_key: str) -> ReqKV | None:
        """Take a row and lock the matched prefix. None when every row is taken."""
        row = self.rows.alloc()
        if row is None:
            return None
        num_pages = len(match.pages)
        self.rows.write(row, 0, match.pages)
        kv = ReqKV(
            row=row,
            extra_key=extra_key,
            lock=self.radix_cache.lock(match.node),
            num_tree_pages=num_pages,
            num_pages=num_pages,
            kv_committed_len=num_pages * self.page_size,
            kv_allocated_len=num_pages * self.page_size,
            num_found_pages=num_pages,
        )
        if self.windows is not None:
            kv.window_from = self.windows.first_page(kv.kv_committed_len)
            self.windows.read(match.pages[kv.window_from :])
        self.live[row] = kv
        return kv

    @contextmanager
    def tentative(self, match: Match, extra_key: str) -> Iterator[TentativeKV]:
        """`admit` for the length of a `with` block."""
        tentative = TentativeKV(self.admit(match, extra_key))
        try:
            yield tentative
        finally:
            if tentative.kv is not None and not tentative.kept:
                self.cache_finished_req(tentative.kv, ())

    def grow(self, kv: ReqKV, num_tokens: int) -> bool:
        """Add pages until `kv` has room for `num_tokens` tokens, for the next forward. Evicts cached prefixes.

        False when there are too few pages. Then nothing has changed.
        """
        return self._grow(kv, num_tokens, for_arrival=False)

    def grow_for_arrival(self, kv: ReqKV, num_tokens: int) -> bool:
        """As `grow`, with pages that a transfer may write from outside the forward stream.

        False also when pages that are still cooling are needed, and prefixes may have been evicted for them. Pages
        cool within a step, so the caller asks again after the next one. Meanwhile a forward may take a page for each
        live request, and those that cool first: so many more are evicted, or arrivals would wait for as long as
        forwards take what was evicted for them.
        """
        missing, allocator = self.pages_for(num_tokens) - kv.num_pages, self.allocator
        if allocator.num_free_for_arrivals < missing <= self.available.pages:
            self._free(self.radix_cache.evict(max(missing + len(self.live) - allocator.num_free, 0)))
        return self._grow(kv, num_tokens, for_arrival=True)

    def slide(self, kv: ReqKV, num_tokens: int | None = None) -> None:
        """Give up the window pages that are not kept behind the committed tokens, or behind `num_tokens`.

        Launched forwards may still name them (see the reuse rule of `PageAllocator`).
        """
        windows = self.windows
        if windows is None or kv.keeps_windows:
            return
        first = windows.first_page(kv.kv_committed_len if num_tokens is None else num_tokens)
        if first <= kv.window_from:
            return
        passed = self.rows.read(kv.row, kv.window_from, min(first, kv.num_pages))
        num_tree_pages = max(kv.num_tree_pages - kv.window_from, 0)
        windows.unread(passed[:num_tree_pages])
        windows.release(passed[num_tree_pages:])
        kv.window_from = first

    def arrived(self, kv: ReqKV, kv_len: int) -> None:
        """Note that a transfer has brought the KV of `kv_len` tokens, with the window before their end."""
        kv.kv_committed_len = kv.kv_allocated_len = kv_len
        self.slide(kv)

    def cache_unfinished_req(self, kv: ReqKV, ids: Sequence[int]) -> None:
        """Insert the committed whole pages of a running request into the tree. `ids` begin with its committed tokens.

        Where the tree already has a page, the row takes the tree's. The request keeps its own page in `superseded`,
        since that page may have been offered to a decode node.
        """
        num_full = kv.kv_committed_len // self.page_size
        if not self.keep_prefixes or num_full <= kv.num_tree_pages:
            return
        num_known, size = kv.num_tree_pages, self.page_size
        own = self.rows.read(kv.row, num_known, num_full)
        new_ids = ids[num_known * size : num_full * size]
        inserted = self.radix_cache.insert(new_ids, own, kv.extra_key, kv.lock)
        self.rows.write(kv.row, num_known, inserted.pages)
        kv.superseded += inserted.duplicates
        if inserted.duplicates:
            kv.num_found_pages = num_known + len(inserted.duplicates)
        kv.num_tree_pages = num_full
        if self.windows is not None:
            self.windows.enter_tree(own, inserted.pages)
            self.windows.read(inserted.pages[max(kv.window_from - num_known, 0) :])

    def release_superseded(self, kv: ReqKV) -> None:
        """Free the superseded pages. No transfer may read them any more."""
        self._free(kv.superseded)
        kv.superseded = []

    def cache_finished_req(self, kv: ReqKV, ids: Sequence[int], *, evict_first: bool = False) -> int:
        """End a request: insert its committed whole pages, free its other pages and its row. Returns the pages freed.

        With `evict_first`, what it has added to the tree is evicted before other prefixes. Forwards of the request
        may still run (see the reuse rule of `PageAllocator`). No transfer may read its pages.
        """
        self.cache_unfinished_req(kv, ids)
        freed = self.rows.read(kv.row, kv.num_tree_pages, kv.num_pages) + kv.superseded
        self._free(freed)
        if self.windows is not None:
            seen, num_found = self._tree_windows(kv), max(kv.num_found_pages - kv.window_from, 0)
            self.windows.unread(seen[:num_found])
            self.windows.unread(seen[num_found:], first=evict_first)
        kv.lock.release(kv.num_found_pages if evict_first else None)
        self.rows.free(kv.row)
        del self.live[kv.row]
        return len(freed)

    def flush(self) -> bool:
        """Evict every prefix that is not locked. False if some are, and stay."""
        self._free(self.radix_cache.evict(self.radix_cache.num_evictable_pages))
        return not self.radix_cache.num_protected_pages

    def evict_behind(self, ids: Sequence[int], num_pages: int, extra_key: str) -> int:
        """Evict page `num_pages` of a cached prefix and all that continues it, but what live requests read.

        Returns the number of evicted pages.
        """
        pages = self.radix_cache.evict_behind(ids, num_pages, extra_key)
        self._free(pages)
        return len(pages)

    def forward_launched(self) -> None:
        """Count a forward or a copy that was handed to the stream. It may use every page that has an owner now."""
        self.allocator.forward_launched()
        if self.windows is not None:
            self.windows.allocator.forward_launched()

    def forward_retired(self) -> None:
        """Count the oldest of them as done. It uses no page from now on."""
        self.allocator.forward_retired()
        if self.windows is not None:
            self.windows.allocator.forward_retired()

    def count(self) -> PageCount:
        """Count the pages of each owner."""
        return PageCount(
            free=self.allocator.num_free,
            evictable=self.radix_cache.num_evictable_pages,
            protected=self.radix_cache.num_protected_pages,
            held=sum(kv.num_pages - kv.num_tree_pages + len(kv.superseded) for kv in self.live.values()),
            total=self.allocator.num_pages,
        )

    def count_windows(self) -> PageCount:
        """Count the window pages of each owner of their pages."""
        windows = self.windows
        if windows is None:
            return PageCount(0, 0, 0, 0, 0)
        return PageCount(
            free=windows.allocator.num_free,
            evictable=windows.num_evictable,
            protected=windows.num_protected,
            held=sum(len(self._own_windows(kv)) for kv in self.live.values()),
            total=windows.allocator.num_pages,
        )

    # ------------------------------------------------------------------------------------------ inside
    def _free(self, pages: Sequence[int]) -> None:
        """Return pages, and what they have of window pages, to the free lists."""
        if self.windows is not None:
            self.windows.release(pages)
        self.allocator.free(pages)

    def _own_windows(self, kv: ReqKV) -> list[int]:
        """Pages of a request's own that have window pages."""
        assert self.windows is not None
        own = self.rows.read(kv.row, max(kv.window_from, kv.num_tree_pages), kv.num_pages)
        return own + [page for page in kv.superseded if self.windows.of_page[page]]

    def _tree_windows(self, kv: ReqKV) -> list[int]:
        """Pages of the tree that a request sees through its window."""
        return self.rows.read(kv.row, kv.window_from, kv.num_tree_pages)

    def _grow(self, kv: ReqKV, num_tokens: int, *, for_arrival: bool) -> bool:
        allocator, windows, num_pages = self.allocator, self.windows, self.pages_for(num_tokens)
        missing = num_pages - kv.num_pages
        if missing <= 0:
            return True
        if missing > self.available.pages:
            return False
        num_windows = max(num_pages - max(kv.num_pages, kv.window_from), 0)
        if windows is not None and not windows.make_room(
            num_windows, num_live=len(self.live) if for_arrival else None
        ):
            return False
        if missing > allocator.num_free:
            self._free(self.radix_cache.evict(missing - allocator.num_free))
        pages = allocator.alloc_for_arrival(missing) if for_arrival else allocator.alloc(missing)
        if pages is None:
            return False
        if windows is not None:
            windows.take(pages[missing - num_windows :], for_arrival=for_arrival)
        self.rows.write(kv.row, kv.num_pages, pages)
        kv.num_pages += len(pages)
        return True
