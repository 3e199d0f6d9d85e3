"""The KV that each request holds. A page changes its owner in this file only.

A page has one owner at any time: the allocator (free), the RadixCache (evictable, or protected while a request reads
it), or one request (held). The row of a request in the page table is divided into

    [ pages of the tree, locked        | pages of its own                        ]
    0                       num_tree_pages                             num_pages

and its tokens into

    [ computed and committed   | used by a launched forward | allocated, unused ]
    0            kv_committed_len              kv_allocated_len    num_pages * page_size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.kvcache.allocator import HostPages, PageAllocator
from shared.kvcache.pools import ReqToTokenPool
from shared.kvcache.radix_cache import Match, Peek, PrefixLock, RadixCache


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


@dataclass(frozen=True, slots=True)
class PageCount:
    """Pages by owner. The first four add up to `total`."""

    free: int
    evictable: int
    protected: int
    held: int
    total: int


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
    ) -> None:
        self.allocator = allocator
        self.rows = rows
        self.radix_cache = radix_cache
        self.page_size = rows.page_size
        self.keep_prefixes = keep_prefixes
        self.host = host or HostPages()
        self.live: dict[int, ReqKV] = {}

    @property
    def num_available_pages(self) -> int:
        """Pages that a forward can get: free or evictable ones."""
        return self.allocator.num_free + self.radix_cache.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

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
        return self._grow(kv, num_tokens, self.allocator.alloc)

    def grow_for_arrival(self, kv: ReqKV, num_tokens: int) -> bool:
        """As `grow`, with pages that a transfer may write from outside the forward stream.

        False also when pages that are still cooling are needed, and prefixes may have been evicted for them. Pages
        cool within a step, so the caller asks again after the next one. Meanwhile a forward may take a page for each
        live request, and those that cool first: so many more are evicted, or arrivals would wait for as long as
        forwards take what was evicted for them.
        """
        missing, allocator = self.pages_for(num_tokens) - kv.num_pages, self.allocator
        if allocator.num_free_for_arrivals < missing <= self.num_available_pages:
            allocator.free(self.radix_cache.evict(max(missing + len(self.live) - allocator.num_free, 0)))
        return self._grow(kv, num_tokens, allocator.alloc_for_arrival)

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

    def release_superseded(self, kv: ReqKV) -> None:
        """Free the superseded pages. No transfer may read them any more."""
        self.allocator.free(kv.superseded)
        kv.superseded = []

    def cache_finished_req(self, kv: ReqKV, ids: Sequence[int], *, evict_first: bool = False) -> int:
        """End a request: insert its committed whole pages, free its other pages and its row. Returns the pages freed.

        With `evict_first`, what it has added to the tree is evicted before other prefixes. Forwards of the request
        may still run (see the reuse rule of `PageAllocator`). No transfer may read its pages.
        """
        self.cache_unfinished_req(kv, ids)
        freed = self.rows.read(kv.row, kv.num_tree_pages, kv.num_pages) + kv.superseded
        self.allocator.free(freed)
        kv.lock.release(kv.num_found_pages if evict_first else None)
        self.rows.free(kv.row)
        del self.live[kv.row]
        return len(freed)

    def flush(self) -> bool:
        """Evict every prefix that is not locked. False if some are, and stay."""
        self.allocator.free(self.radix_cache.evict(self.radix_cache.num_evictable_pages))
        return not self.radix_cache.num_protected_pages

    def evict_behind(self, ids: Sequence[int], num_pages: int, extra_key: str) -> int:
        """Evict page `num_pages` of a cached prefix and all that continues it, but what live requests read.

        Returns the number of evicted pages.
        """
        pages = self.radix_cache.evict_behind(ids, num_pages, extra_key)
        self.allocator.free(pages)
        return len(pages)

    def count(self) -> PageCount:
        """Count the pages of each owner."""
        return PageCount(
            free=self.allocator.num_free,
            evictable=self.radix_cache.num_evictable_pages,
            protected=self.radix_cache.num_protected_pages,
            held=sum(kv.num_pages - kv.num_tree_pages + len(kv.superseded) for kv in self.live.values()),
            total=self.allocator.num_pages,
        )

    def _grow(self, kv: ReqKV, num_tokens: int, alloc: Callable[[int], list[int] | None]) -> bool:
        missing = self.pages_for(num_tokens) - kv.num_pages
        if missing <= 0:
            return True
        if missing > self.num_available_pages:
            return False
        if missing > self.allocator.num_free:
            self.allocator.free(self.radix_cache.evict(missing - self.allocator.num_free))
        if (pages := alloc(missing)) is None:
            return False
        self.rows.write(kv.row, kv.num_pages, pages)
        kv.num_pages += len(pages)
        return True
