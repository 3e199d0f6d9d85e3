"""What KV each request holds, and the only place where a page changes its owner.

Every page has exactly one owner at any time: nobody (free), the RadixCache (evictable, or protected while a
request reads it), or one request (held). A request's row of the page table reads

    [ pages of the tree, locked        | pages of its own                        ]
    0                       num_tree_pages                             num_pages

and counts tokens as

    [ computed and committed   | named by a launched forward | allocated, unused ]
    0            kv_committed_len              kv_allocated_len    num_pages * page_size
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.kvcache.allocator import PageAllocator
from shared.kvcache.host_pages import HostPages
from shared.kvcache.pools import ReqToTokenPool
from shared.kvcache.radix_cache import Match, Peek, PrefixLock, RadixCache


@dataclass(eq=False, slots=True)
class ReqKV:
    """The KV of one admitted request. Made by `KVLedger.admit`, dead after `KVLedger.cache_finished_req`."""

    row: int
    extra_key: str
    lock: PrefixLock
    num_tree_pages: int
    num_pages: int
    kv_committed_len: int
    kv_allocated_len: int
    superseded: list[int] = field(default_factory=list)
    """Own pages that the tree had already; no longer in the row, but perhaps still being sent."""


@dataclass(frozen=True, slots=True)
class PageCount:
    """Who owns how many pages; the first four add up to the last."""

    free: int
    evictable: int
    protected: int
    held: int
    total: int


@dataclass(eq=False, slots=True)
class Admission:
    """A row and a prefix lock that are given back at the end of `KVLedger.tentative`, unless kept."""

    kv: ReqKV | None
    kept: bool = False

    def keep(self) -> ReqKV:
        """From now on the caller owns it."""
        assert self.kv is not None
        self.kept = True
        return self.kv


class KVLedger:
    """Pages and rows of one node. Belongs to the scheduler thread."""

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
        """Pages that a forward can have: free, or evictable."""
        return self.allocator.num_free + self.radix_cache.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match_prefix(self, ids: Sequence[int], extra_key: str) -> Match:
        """The cached prefix of `ids`, but never all of it: the last token is computed."""
        return self.radix_cache.match_prefix(ids[: len(ids) - 1], extra_key)

    def peek_prefix(self, ids: Sequence[int], extra_key: str) -> Peek:
        """What `match_prefix` would find; takes no note of it and changes nothing."""
        return self.radix_cache.peek(ids, len(ids) - 1, extra_key)

    def num_pages_released_by(self, kvs: Sequence[ReqKV]) -> int:
        """Pages that would become available if all these requests ended now."""
        own = sum(kv.num_pages - kv.num_tree_pages + len(kv.superseded) for kv in kvs)
        return own + self.radix_cache.num_pages_unlocked_by(kv.lock for kv in kvs)

    def admit(self, match: Match, extra_key: str) -> ReqKV | None:
        """Take a row and hold the matched prefix; None when every row is taken."""
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
        )
        self.live[row] = kv
        return kv

    @contextmanager
    def tentative(self, match: Match, extra_key: str) -> Iterator[Admission]:
        """`admit` for the length of a block; released at its end unless the block keeps it."""
        admission = Admission(self.admit(match, extra_key))
        try:
            yield admission
        finally:
            if admission.kv is not None and not admission.kept:
                self.cache_finished_req(admission.kv, ())

    def grow(self, kv: ReqKV, num_tokens: int) -> bool:
        """Own pages for `num_tokens` tokens in all, for the next forward; evicts.

        False when there are too few; then nothing has changed.
        """
        missing = self.pages_for(num_tokens) - kv.num_pages
        if missing > 0:
            if missing > self.num_available_pages:
                return False
            self._evict_down_to(missing - self.allocator.num_free)
            self._append(kv, self.allocator.alloc(missing))
        return True

    def grow_for_arrival(self, kv: ReqKV, num_tokens: int) -> bool:
        """The same, for a transfer that writes from outside the forward stream.

        Pages that still cool count as free here: False then means "ask again after the next step".
        """
        missing = self.pages_for(num_tokens) - kv.num_pages
        if missing > 0:
            if missing > self.num_available_pages:
                return False
            self._evict_down_to(missing - self.allocator.num_free)
            pages = self.allocator.alloc_for_arrival(missing)
            if pages is None:
                return False
            self._append(kv, pages)
        return True

    def cache_unfinished_req(self, kv: ReqKV, ids: Sequence[int]) -> None:
        """Share the committed whole pages of a request that goes on; `ids` are its tokens, at least the committed.

        Where the tree already has a page, the row takes the tree's. The own page stays held until the request
        ends: it may have been offered to a decode node.
        """
        num_full = kv.kv_committed_len // self.page_size
        if not self.keep_prefixes or num_full <= kv.num_tree_pages:
            return
        own = self.rows.read(kv.row, 0, num_full)
        inserted = self.radix_cache.insert(ids[: num_full * self.page_size], own, kv.extra_key)
        kv.lock.move_to(inserted.node)
        self.rows.write(kv.row, 0, inserted.pages)
        kv.superseded += inserted.duplicates
        kv.num_tree_pages = num_full

    def release_superseded(self, kv: ReqKV) -> None:
        """Give back own pages that the tree had already, where nobody is being sent them."""
        self.allocator.free(kv.superseded)
        kv.superseded = []

    def cache_finished_req(self, kv: ReqKV, ids: Sequence[int]) -> int:
        """End a request: share its committed whole pages, give back the rest and the row. Returns pages freed.

        The request's launched forwards may still run: see the reuse rule of `PageAllocator`. Nobody may be
        reading its pages for a transfer any more.
        """
        self.cache_unfinished_req(kv, ids)
        freed = self.rows.read(kv.row, kv.num_tree_pages, kv.num_pages) + kv.superseded
        self.allocator.free(freed)
        kv.lock.release()
        self.rows.free(kv.row)
        del self.live[kv.row]
        return len(freed)

    def flush(self) -> None:
        """Forget every prefix that nobody reads."""
        self.allocator.free(self.radix_cache.evict(self.radix_cache.num_evictable_pages))

    def count(self) -> PageCount:
        """Who owns how many pages now."""
        return PageCount(
            free=self.allocator.num_free,
            evictable=self.radix_cache.num_evictable_pages,
            protected=self.radix_cache.num_protected_pages,
            held=sum(kv.num_pages - kv.num_tree_pages + len(kv.superseded) for kv in self.live.values()),
            total=self.allocator.num_pages,
        )

    def _evict_down_to(self, missing: int) -> None:
        if missing > 0:
            self.allocator.free(self.radix_cache.evict(missing))

    def _append(self, kv: ReqKV, pages: list[int] | None) -> None:
        assert pages is not None
        self.rows.write(kv.row, kv.num_pages, pages)
        kv.num_pages += len(pages)
