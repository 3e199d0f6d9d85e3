"""RadixCache, allocator and ledger under any sequence of admissions, commits, retractions and arrivals."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.kvcache.audit import audit, audit_idle
from shared.kvcache.ledger import KVLedger, ReqKV
from shared.kvcache.windows import WindowPages

NUM_PAGES = 24
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


class Held:
    """A request as the machine knows it: its tokens, its KV, and whether a transfer writes its pages."""

    def __init__(self, ids: list[int], kv: ReqKV, extra_key: str) -> None:
        self.ids, self.kv, self.extra_key = ids, kv, extra_key


class LedgerMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = self.make()
        self.in_flight: list[set[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """What each page of the tree holds: the tokens of its whole prefix."""

    def make(self, page_size: int = 2, keep: bool = True) -> KVLedger:
        options = CacheOptions(page_size=page_size, disable_radix_cache=not keep)
        return make_ledger(NUM_PAGES + 1, options, num_rows=5, context_length=64)

    def pages_of(self, kv: ReqKV) -> list[int]:
        return self.ledger.rows.read(kv.row, 0, kv.num_pages)

    def named_by(self, kv: ReqKV, first: int = 0) -> set[int]:
        """What a forward that is launched now may name of a request."""
        return set(self.pages_of(kv)[first:])

    @rule(target=held, ids=TOKENS, extra_key=st.sampled_from(["", "a"]), arrival=st.booleans())
    def admit(self, ids: list[int], extra_key: str, arrival: bool) -> Held | None:  # type: ignore[return]
        ledger = self.ledger
        match = ledger.match_prefix(ids, extra_key)
        before = ledger.count()
        with ledger.tentative(match, extra_key) as tentative:
            if tentative.kv is None:
                assert ledger.rows.num_free == 0
                return Held(ids, None, extra_key)  # type: ignore[arg-type]
            kv = tentative.kv
            owned = kv.num_pages
            grown = ledger.grow_for_arrival(kv, len(ids)) if arrival else ledger.grow(kv, len(ids))
            if grown:
                tentative.keep()
                if arrival:
                    fresh = self.named_by(kv, owned)
                    for named in self.in_flight:
                        assert not fresh & named, "a transfer was given a page that a running forward names"
        if not grown:
            after = ledger.count()
            assert (after.held, after.protected) == (before.held, before.protected)
            assert arrival or ledger.windows or ledger.pages_for(len(ids)) > before.free
            return Held(ids, None, extra_key)  # type: ignore[arg-type]
        for i, page in enumerate(match.pages):
            assert self.content[page] == (extra_key, *ids[: (i + 1) * ledger.page_size])
        kv.kv_allocated_len = len(ids)
        self.forget(self.pages_of(kv)[owned:])
        self.check_hit(match.pages)
        return Held(ids, kv, extra_key)

    @rule(req=held, upto=st.integers(0, 20))
    def commit(self, req: Held, upto: int) -> None:
        if req.kv is None or req.kv.row not in self.ledger.live or self.ledger.live[req.kv.row] is not req.kv:
            return
        req.kv.kv_committed_len = max(req.kv.kv_committed_len, min(upto, len(req.ids)))
        self.ledger.cache_unfinished_req(req.kv, req.ids)
        self.note(req)

    @rule(req=held, token=st.integers(0, 2))
    def decode(self, req: Held, token: int) -> None:
        if req.kv is None or self.ledger.live.get(req.kv.row) is not req.kv:
            return
        owned = req.kv.num_pages
        if self.ledger.grow(req.kv, len(req.ids) + 1):
            self.forget(self.pages_of(req.kv)[owned:])
            req.ids = [*req.ids, token]
            req.kv.kv_allocated_len = len(req.ids)

    @rule(req=consumes(held), evict_first=st.booleans())
    def finish(self, req: Held, evict_first: bool) -> None:
        if req.kv is not None and self.ledger.live.get(req.kv.row) is req.kv:
            superseded = set(req.kv.superseded)
            kept = set(self.pages_of(req.kv)[: req.kv.kv_committed_len // self.ledger.page_size])
            assert not superseded & kept, "a superseded page is still in the row"
            self.note(req)
            self.ledger.cache_finished_req(req.kv, req.ids, evict_first=evict_first)

    @rule(ids=TOKENS, num_pages=st.integers(0, 4), extra_key=st.sampled_from(["", "a"]))
    def evict_behind(self, ids: list[int], num_pages: int, extra_key: str) -> None:
        ledger = self.ledger
        locked = {
            page for kv in ledger.live.values() for page in ledger.rows.read(kv.row, 0, kv.num_tree_pages)
        }
        size, before = ledger.page_size, set(ledger.radix_cache.pages())
        doomed = (extra_key, *ids[: (num_pages + 1) * size])
        evicted = ledger.evict_behind(ids, num_pages, extra_key)
        behind = {page for page in before if self.content[page][: len(doomed)] == doomed}
        if len(ids) < (num_pages + 1) * size:
            behind = set()
        after = set(ledger.radix_cache.pages())
        assert before - after == behind - locked
        assert len(before - after) == evicted

    @rule()
    def launch(self) -> None:
        if len(self.in_flight) < 2:
            self.in_flight.append({page for kv in self.ledger.live.values() for page in self.named_by(kv)})
            self.ledger.forward_launched()

    @rule()
    def retire(self) -> None:
        if self.in_flight:
            self.in_flight.pop(0)
            self.ledger.forward_retired()

    @rule()
    def flush(self) -> None:
        self.ledger.flush()
        assert self.ledger.radix_cache.num_evictable_pages == 0

    def note(self, req: Held) -> None:
        """Remember what the tree's pages of this request must hold."""
        full = req.kv.kv_committed_len // self.ledger.page_size
        for i, page in enumerate(self.pages_of(req.kv)[:full]):
            self.content[page] = (req.extra_key, *req.ids[: (i + 1) * self.ledger.page_size])

    def forget(self, pages: list[int]) -> None:
        """What the last owners of new pages have written says nothing."""

    def check_hit(self, pages: list[int]) -> None:
        """What must hold of a prefix that was found."""

    @invariant()
    def every_page_has_one_owner(self) -> None:
        audit(self.ledger)

    @invariant()
    def locks_equal_live_holders(self) -> None:
        root = self.ledger.radix_cache._root
        assert root.lock_ref == len(self.ledger.live)

    def teardown(self) -> None:
        for row, kv in list(self.ledger.live.items()):
            del row
            self.ledger.cache_finished_req(kv, ())
        while self.in_flight:
            self.retire()
        audit_idle(self.ledger)
        self.ledger.flush()
        assert self.ledger.allocator.num_free_for_arrivals == NUM_PAGES


class PageSizeOne(LedgerMachine):
    def make(self, page_size: int = 1, keep: bool = True) -> KVLedger:
        return super().make(page_size, keep)


class WithoutRadixCache(LedgerMachine):
    def make(self, page_size: int = 2, keep: bool = False) -> KVLedger:
        return super().make(page_size, keep)


class WithWindows(LedgerMachine):
    """Layers with a window of 5 tokens, in fewer window pages than there are pages."""

    window, num_window_pages = 5, 12

    def make(self, page_size: int = 2, keep: bool = True) -> KVLedger:
        self.window_content: dict[int, tuple[int, ...]] = {}
        self.windows = WindowPages(NUM_PAGES + 1, self.num_window_pages + 1, self.window, page_size)
        options = CacheOptions(page_size=page_size, disable_radix_cache=not keep)
        return make_ledger(NUM_PAGES + 1, options, num_rows=5, context_length=64, windows=self.windows)

    def named_by(self, kv: ReqKV, first: int = 0) -> set[int]:
        """Window pages are negative."""
        pages = super().named_by(kv, first)
        return pages | {-int(self.windows.of_page[page]) for page in pages if self.windows.of_page[page]}

    def note(self, req: Held) -> None:
        """What is computed has been written to window pages too."""
        super().note(req)
        kv, size = req.kv, self.ledger.page_size
        pages = self.pages_of(kv)
        for i in range(kv.window_from, min(len(pages), kv.kv_committed_len // size)):
            content = (req.extra_key, *req.ids[: (i + 1) * size])
            before = self.window_content.setdefault(int(self.windows.of_page[pages[i]]), content)
            assert before == content, "a token would see another request's window page"

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            self.window_content.pop(int(self.windows.of_page[page]), None)

    def check_hit(self, pages: list[int]) -> None:
        first = self.windows.first_page(len(pages) * self.ledger.page_size)
        for page in pages[first:]:
            assert self.window_content[int(self.windows.of_page[page])] == self.content[page]

    @rule(req=LedgerMachine.held)
    def slide(self, req: Held) -> None:
        if req.kv is not None and self.ledger.live.get(req.kv.row) is req.kv:
            self.ledger.slide(req.kv)

    @invariant()
    def content_is_that_of_owned_pages(self) -> None:
        named = set(self.windows.of_page.tolist())
        self.window_content = {page: ids for page, ids in self.window_content.items() if page in named}

    def teardown(self) -> None:
        super().teardown()
        assert self.windows.allocator.num_free_for_arrivals == self.num_window_pages


TestLedger = LedgerMachine.TestCase
TestLedgerPageSizeOne = PageSizeOne.TestCase
TestLedgerWithoutRadixCache = WithoutRadixCache.TestCase
TestLedgerWithWindows = WithWindows.TestCase
TestLedger.settings = TestLedgerPageSizeOne.settings = settings(max_examples=80, stateful_step_count=40)
TestLedgerWithoutRadixCache.settings = TestLedgerWithWindows.settings = TestLedger.settings
