from __future__ import annotations

import itertools

import pytest

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.kvcache.audit import LeakError, audit, audit_idle
from shared.kvcache.ledger import KVLedger, ReqKV
from shared.kvcache.windows import WindowPages

NUM_PAGES = 12


def new_ledger(*, page_size: int = 4, keep: bool = True, num_rows: int = 4) -> KVLedger:
    options = CacheOptions(page_size=page_size, disable_radix_cache=not keep)
    return make_ledger(NUM_PAGES + 1, options, num_rows, 64)


def windowed_ledger(num_window_pages: int) -> KVLedger:
    """A window of 5 tokens, and pages of 4."""
    windows = WindowPages(NUM_PAGES + 1, num_window_pages + 1, 5, 4)
    return make_ledger(NUM_PAGES + 1, CacheOptions(page_size=4), 4, 64, windows=windows)


def admit(ledger: KVLedger, ids: list[int], *, committed: int | None = None, extra_key: str = "") -> ReqKV:
    """Admit, grow to all of `ids`, and commit that many tokens of it."""
    kv = ledger.admit(ledger.match_prefix(ids, extra_key), extra_key)
    assert kv is not None
    assert ledger.grow(kv, len(ids))
    kv.kv_allocated_len = len(ids)
    kv.kv_committed_len = len(ids) if committed is None else committed
    return kv


def pages_of(ledger: KVLedger, kv: ReqKV) -> list[int]:
    return ledger.rows.read(kv.row, 0, kv.num_pages)


TEN = list(range(10))


def test_a_finished_request_leaves_its_whole_committed_pages() -> None:
    ledger = new_ledger()
    kv = admit(ledger, TEN, committed=9)
    assert ledger.count().held == 3
    assert ledger.cache_finished_req(kv, TEN) == 1
    assert ledger.count().evictable == 2
    assert ledger.match_prefix(TEN, "").pages == ledger.radix_cache.pages()
    audit_idle(ledger)


def test_the_last_token_is_never_matched() -> None:
    ledger = new_ledger()
    ledger.cache_finished_req(admit(ledger, TEN[:8]), TEN[:8])
    assert len(ledger.match_prefix(TEN[:8], "").pages) == 1
    assert len(ledger.match_prefix(TEN[:9], "").pages) == 2


def test_a_second_request_starts_with_the_tree_s_pages() -> None:
    ledger = new_ledger()
    ledger.cache_finished_req(admit(ledger, TEN), TEN)
    shared = ledger.radix_cache.pages()
    kv = ledger.admit(ledger.match_prefix(TEN, ""), "")
    assert kv is not None
    assert (kv.num_tree_pages, kv.kv_committed_len, kv.kv_allocated_len) == (2, 8, 8)
    assert pages_of(ledger, kv) == shared
    assert ledger.count().protected == 2
    ledger.flush()
    assert ledger.count().protected == 2, "pages that a request reads survive a flush"
    ledger.cache_finished_req(kv, ())
    audit_idle(ledger)


def test_two_requests_that_compute_the_same_prefix_hold_their_duplicates_until_they_end() -> None:
    ledger = new_ledger()
    first, second = admit(ledger, TEN), admit(ledger, TEN)
    own = pages_of(ledger, second)
    ledger.cache_unfinished_req(first, TEN)
    ledger.cache_unfinished_req(second, TEN)
    assert pages_of(ledger, second)[:2] == pages_of(ledger, first)[:2]
    assert second.superseded == own[:2]
    assert ledger.count().held == 4
    audit(ledger)
    assert ledger.cache_finished_req(second, TEN) == 3
    audit(ledger)
    ledger.cache_finished_req(first, TEN)
    audit_idle(ledger)


def test_caching_twice_without_progress_changes_nothing() -> None:
    ledger = new_ledger()
    kv = admit(ledger, TEN)
    ledger.cache_unfinished_req(kv, TEN)
    before = (pages_of(ledger, kv), ledger.count())
    ledger.cache_unfinished_req(kv, TEN)
    assert before == (pages_of(ledger, kv), ledger.count())
    assert kv.superseded == []


def test_growing_evicts_only_what_is_missing() -> None:
    ledger = new_ledger()
    ledger.cache_finished_req(admit(ledger, list(range(100, 132))), list(range(100, 132)))
    assert (ledger.count().free, ledger.count().evictable) == (4, 8)
    kv = admit(ledger, list(range(24)))
    assert (ledger.count().free, ledger.count().evictable) == (0, 6)
    assert not ledger.grow(kv, 4 * 13)
    assert ledger.count().evictable == 6, "a refusal changes nothing"
    assert ledger.grow(kv, 4 * 12)
    audit(ledger)


def test_growing_to_less_changes_nothing() -> None:
    ledger = new_ledger()
    kv = admit(ledger, TEN)
    assert ledger.grow(kv, 3)
    assert kv.num_pages == 3


def test_an_arrival_waits_for_pages_that_cool() -> None:
    ledger = new_ledger()
    kv = admit(ledger, list(range(48)), committed=0)
    ledger.allocator.forward_launched()
    ledger.cache_finished_req(kv, ())
    arriving = ledger.admit(ledger.match_prefix(TEN, ""), "")
    assert arriving is not None
    assert not ledger.grow_for_arrival(arriving, 10)
    assert arriving.num_pages == 0
    assert ledger.grow(arriving, 4), "a later forward may have them at once"
    ledger.allocator.forward_retired()
    assert ledger.grow_for_arrival(arriving, 10)
    ledger.cache_finished_req(arriving, ())
    audit_idle(ledger)


@pytest.mark.parametrize("num_window_pages", [None, 8])
def test_an_arrival_gets_its_pages_although_every_forward_takes_some_that_cool(
    num_window_pages: int | None,
) -> None:
    ledger = new_ledger() if num_window_pages is None else windowed_ledger(num_window_pages)
    num_pages = ledger.num_pages_with_windows
    cached = list(range(100, 100 + 4 * num_pages))
    ledger.cache_finished_req(admit(ledger, cached), cached)
    running = ledger.admit(ledger.match_prefix([1], ""), "")
    arriving = ledger.admit(ledger.match_prefix([2], ""), "")
    assert running is not None and arriving is not None
    ledger.forward_launched()
    turns = 1
    while not ledger.grow_for_arrival(arriving, 4):
        assert turns < 4, "the arrival starves beside a cache that could be evicted"
        assert ledger.grow(running, 4 * turns), "each decode step takes a page"
        ledger.forward_launched()
        ledger.forward_retired()
        turns += 1
    assert arriving.num_pages == 1
    count = ledger.count() if num_window_pages is None else ledger.count_windows()
    assert count.evictable >= num_pages - 4, "little more was evicted than was needed"


def test_forwards_take_cooling_pages_first_and_leave_cool_ones_for_arrivals() -> None:
    allocator = new_ledger().allocator
    pages = allocator.alloc(NUM_PAGES - 4) or []
    allocator.forward_launched()
    allocator.free(pages[:2])
    assert set(allocator.alloc(3) or []) > set(pages[:2])
    assert allocator.num_free_for_arrivals == 3
    with pytest.raises(AssertionError):
        [allocator.forward_retired() for _ in range(2)]


def test_what_another_node_keeps_is_evicted_before_the_rest_but_for_what_was_cached_before() -> None:
    ledger = new_ledger()
    for ids in (TEN[:5], [90, 91, 92, 93]):
        ledger.cache_finished_req(admit(ledger, ids), ids)
    kept_elsewhere = admit(ledger, TEN)
    assert kept_elsewhere.num_found_pages == 1
    ledger.cache_finished_req(kept_elsewhere, TEN, evict_first=True)
    for num_older in (1, 0):
        ledger.allocator.free(ledger.radix_cache.evict(1))
        assert ledger.radix_cache.peek(TEN, 8).num_pages == 1
        assert ledger.radix_cache.peek([90, 91, 92, 93], 4).num_pages == num_older


def test_what_another_request_has_computed_too_keeps_its_place() -> None:
    ledger = new_ledger()
    keeps, kept_elsewhere = admit(ledger, TEN), admit(ledger, TEN)
    ledger.cache_finished_req(keeps, TEN)
    ledger.cache_finished_req(admit(ledger, [90, 91, 92, 93]), [90, 91, 92, 93])
    ledger.cache_finished_req(kept_elsewhere, TEN, evict_first=True)
    ledger.allocator.free(ledger.radix_cache.evict(1))
    assert ledger.radix_cache.peek([90, 91, 92, 93], 4).num_pages == 0
    assert ledger.radix_cache.peek(TEN, 8).num_pages == 2


def test_an_arrival_too_large_for_the_pool_is_refused_without_eviction() -> None:
    ledger = new_ledger()
    ledger.cache_finished_req(admit(ledger, TEN), TEN)
    kv = ledger.admit(ledger.match_prefix([99], ""), "")
    assert kv is not None
    assert not ledger.grow_for_arrival(kv, 4 * NUM_PAGES + 1)
    assert ledger.count().evictable == 2


def test_without_a_free_row_there_is_no_kv() -> None:
    ledger = new_ledger(num_rows=1)
    assert ledger.admit(ledger.match_prefix(TEN, ""), "") is not None
    assert ledger.admit(ledger.match_prefix(TEN, ""), "") is None
    with ledger.tentative(ledger.match_prefix(TEN, ""), "") as tentative:
        assert tentative.kv is None


def test_tentative_kv_is_released_also_when_the_block_raises() -> None:
    ledger = new_ledger()

    def fail() -> None:
        with ledger.tentative(ledger.match_prefix(TEN, ""), "") as tentative:
            assert tentative.kv is not None
            assert ledger.grow(tentative.kv, 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    audit_idle(ledger)
    with ledger.tentative(ledger.match_prefix(TEN, ""), "") as tentative:
        kept = tentative.keep()
    assert ledger.live == {kept.row: kept}


def test_without_a_radix_cache_nothing_is_kept() -> None:
    ledger = new_ledger(keep=False)
    kv = admit(ledger, TEN)
    ledger.cache_unfinished_req(kv, TEN)
    assert kv.num_tree_pages == 0
    assert ledger.cache_finished_req(kv, TEN) == 3
    assert ledger.count().free == NUM_PAGES


class TestAudit:
    def test_a_page_without_owner(self) -> None:
        ledger = new_ledger()
        (lost,) = ledger.allocator.alloc(1) or []
        with pytest.raises(LeakError, match=rf"with none \[{lost}\]"):
            audit(ledger)

    def test_a_page_with_two_owners(self) -> None:
        ledger = new_ledger()
        kv = admit(ledger, TEN)
        page = pages_of(ledger, kv)[0]
        ledger.allocator.free([page])
        with pytest.raises(LeakError, match=rf"two owners \[{page}\]"):
            audit(ledger)

    def test_an_unknown_page(self) -> None:
        ledger = new_ledger()
        kv = admit(ledger, TEN)
        ledger.rows.write(kv.row, 0, [77])
        with pytest.raises(LeakError, match=r"unknown \[77\]"):
            audit(ledger)

    def test_a_lost_row(self) -> None:
        ledger = new_ledger()
        ledger.rows.alloc()
        with pytest.raises(LeakError, match="3 free rows"):
            audit(ledger)

    def test_a_lost_host_page(self) -> None:
        ledger = new_ledger()
        ledger.host.num_pages += 1
        with pytest.raises(LeakError, match="1 in all"):
            audit(ledger)

    def test_a_request_that_still_holds_pages_on_an_idle_node(self) -> None:
        ledger = new_ledger()
        admit(ledger, TEN)
        audit(ledger)
        with pytest.raises(LeakError, match="idle"):
            audit_idle(ledger)

    def test_a_row_is_freed_once(self) -> None:
        ledger = new_ledger()
        with pytest.raises(AssertionError, match="row 2 "):
            ledger.rows.free(2)


def test_window_pages_of_what_is_to_be_evicted_first_go_first() -> None:
    """A prefix that has lost its window is looked up again. A hit within a node locks no page behind it."""
    ledger = windowed_ledger(num_window_pages=4)
    older, newer = list(range(100, 108)), list(range(200, 208))
    for ids in (older, newer):
        ledger.cache_finished_req(admit(ledger, ids), ids, evict_first=ids is newer)
    before, windows = ledger.radix_cache.num_changes, ledger.windows
    assert windows is not None and windows.make_room(1)
    assert ledger.radix_cache.num_changes > before
    assert [ledger.radix_cache.peek(ids, 8).num_pages for ids in (older, newer)] == [2, 1]
    kv = ledger.admit(ledger.match_prefix([*newer, 1], ""), "")
    assert kv is not None and ledger.count().protected == kv.num_pages == 1
    ledger.cache_finished_req(kv, ())
    audit_idle(ledger)


def test_of_what_is_evicted_first_a_request_has_added_the_window_itself() -> None:
    """Behind a prefix that it has found, of which it sees nothing any more."""
    ledger = windowed_ledger(num_window_pages=6)
    found, ids = list(range(8)), [*range(8), *range(100, 108)]
    ledger.cache_finished_req(admit(ledger, found), found)
    kv = admit(ledger, ids)
    ledger.slide(kv)
    ledger.cache_finished_req(kv, ids, evict_first=True)
    windows = ledger.windows
    assert windows is not None and ledger.radix_cache.peek(ids, 16).num_pages == 4
    assert windows.make_room(windows.allocator.num_free + 1)
    assert ledger.radix_cache.peek(ids, 16).num_pages == 2


def test_the_window_pages_that_more_tokens_need_are_counted() -> None:
    for num_tokens, num_more in itertools.product(range(1, 20), range(1, 12)):
        ledger = windowed_ledger(num_window_pages=NUM_PAGES)
        kv = admit(ledger, list(range(num_tokens)))
        ledger.slide(kv)
        before, most = ledger.count_windows().held, 0
        for end in range(num_tokens + 1, num_tokens + num_more + 1):
            assert ledger.grow(kv, end)
            most = max(most, ledger.count_windows().held)
            ledger.slide(kv, end)
        assert ledger.window_growth(num_tokens, num_more) - (most - before) in (0, 1)
        of_both = ledger.growth([num_tokens, 3], [num_more, 2])
        assert of_both.window_pages == sum(map(ledger.window_growth, [num_tokens, 3], [num_more, 2])) > 0


def test_a_prefix_that_gets_its_window_back_is_looked_up_again() -> None:
    ledger, ids = windowed_ledger(num_window_pages=4), list(range(8))
    ledger.cache_finished_req(admit(ledger, ids), ids)
    windows = ledger.windows
    assert windows is not None and windows.make_room(4)
    kv, before = admit(ledger, ids), ledger.radix_cache.num_changes
    assert ledger.radix_cache.peek(ids, 8).num_pages == 0
    ledger.cache_unfinished_req(kv, ids)
    assert ledger.radix_cache.num_changes > before
    assert ledger.radix_cache.peek(ids, 8).num_pages == 2
