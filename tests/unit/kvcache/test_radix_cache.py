"""What is evicted, and in which order. tests/prop/test_kv_ledger.py has what is matched, split and locked."""

from __future__ import annotations

import pytest

from shared.kvcache.radix_cache import PrefixLock, RadixCache


def cached(*prefixes: tuple[list[int], list[int]]) -> RadixCache:
    cache = RadixCache(2)
    for ids, pages in prefixes:
        cache.insert(ids, pages)
    return cache


ABCDEF = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_eviction_is_least_recently_used_first() -> None:
    cache = cached(([1, 1], [10]), ([2, 2], [20]), ([3, 3], [30]))
    cache.match_prefix([1, 1])
    assert cache.evict(1) == [20]
    assert cache.evict(1) == [30]
    assert cache.evict(1) == [10]
    assert cache.evict(1) == []


def test_an_insert_counts_as_use() -> None:
    cache = cached(([1, 1], [10]), ([2, 2], [20]), ([1, 1], [11]))
    assert cache.evict(1) == [20]


def test_leaves_are_evicted_before_what_they_hang_on() -> None:
    cache = cached(([1, 1, 2, 2], [10, 11]), ([1, 1, 3, 3], [20, 21]))
    assert cache.evict(2) == [11, 21]
    assert cache.evict(5) == [10]
    assert cache.pages() == []


def test_a_leaf_is_evicted_from_its_end_and_only_as_far_as_needed() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    assert cache.evict(2) == [14, 15]
    assert cache.match_prefix(ABCDEF).pages == [10, 11, 12, 13]
    assert cache.num_evictable_pages == 4
    assert sorted(cache.evict(99)) == [10, 11, 12, 13]
    assert cache.num_evictable_pages == 0


def test_a_locked_prefix_is_never_evicted() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    lock = cache.lock(cache.match_prefix(ABCDEF[:4]).node)
    assert (cache.num_evictable_pages, cache.num_protected_pages) == (4, 2)
    assert sorted(cache.evict(99)) == [12, 13, 14, 15]
    assert cache.evict(1) == []
    lock.release()
    assert (cache.num_evictable_pages, cache.num_protected_pages) == (2, 0)
    assert cache.evict(99) == [10, 11]


def test_two_holders_both_protect() -> None:
    cache = cached(([1, 1], [10]))
    node = cache.match_prefix([1, 1]).node
    one, other = cache.lock(node), cache.lock(node)
    one.release()
    assert cache.evict(1) == []
    other.release()
    assert cache.evict(1) == [10]


def test_a_lock_is_released_once() -> None:
    cache = cached(([1, 1], [10]))
    lock = cache.lock(cache.match_prefix([1, 1]).node)
    lock.release()
    with pytest.raises(AssertionError):
        lock.release()
    with pytest.raises(AssertionError):
        lock.move_to(cache.match_prefix([1, 1]).node)


class TestEvictFirst:
    """What a request that ends has added goes before what was used earlier, but not what others use, too."""

    def old(self) -> RadixCache:
        return cached(([7, 7], [20]))

    def added(self, cache: RadixCache, ids: list[int], pages: list[int], num_found: int = 0) -> PrefixLock:
        """The lock of a request that found so many pages of `ids`, and has computed the others."""
        lock = cache.lock(cache.match_prefix(ids[: 2 * num_found]).node)
        cache.insert(ids[2 * num_found :], pages, lock=lock)
        return lock

    def test_it_goes_before_what_is_older_in_the_order_of_its_release(self) -> None:
        cache = self.old()
        first, second = self.added(cache, ABCDEF[:4], [10, 11]), self.added(cache, [8, 8], [30])
        third = self.added(cache, [6, 6, 5, 5], [50, 51])
        for lock in (second, first, third):
            lock.release(evict_first_from=0)
        cache.insert([9, 9], [40])
        assert [cache.evict(1) for _ in range(7)] == [[30], [11], [10], [51], [50], [20], [40]]

    def test_every_chunk_of_it_does(self) -> None:
        cache = self.old()
        lock = self.added(cache, ABCDEF[:2], [10])
        cache.insert(ABCDEF[2:6], [11, 12], lock=lock)
        lock.release(evict_first_from=0)
        assert sorted(cache.evict(3)) == [10, 11, 12]

    def test_what_was_computed_ahead_of_it_does(self) -> None:
        cache = self.old()
        cache.insert(ABCDEF[:4], [10, 11])
        cache.lock(cache.match_prefix(ABCDEF[:4]).node).release(evict_first_from=0)
        assert [cache.evict(1) for _ in range(3)] == [[11], [10], [20]]

    def test_what_it_has_found_keeps_its_place(self) -> None:
        cache = cached((ABCDEF[:2], [10]), ([7, 7], [20]))
        self.added(cache, ABCDEF[:4], [11], num_found=1).release(evict_first_from=1)
        assert [cache.evict(1) for _ in range(3)] == [[11], [20], [10]]

    def test_what_begins_before_it_keeps_its_place_as_a_whole(self) -> None:
        cache = self.old()
        self.added(cache, ABCDEF[:4], [10, 11]).release(evict_first_from=1)
        assert cache.evict(1) == [20]

    def test_what_another_request_has_continued_keeps_its_place(self) -> None:
        cache = self.old()
        lock = self.added(cache, ABCDEF[:4], [10, 11])
        self.added(cache, ABCDEF[:6], [12], num_found=2).release()
        self.added(cache, [*ABCDEF[:4], 4, 4], [13], num_found=2).release(evict_first_from=2)
        cache.insert([9, 9], [40])
        cache.match_prefix(ABCDEF[:4])
        lock.release(evict_first_from=0)
        assert [cache.evict(1) for _ in range(6)] == [[13], [20], [12], [40], [11], [10]]

    def test_what_another_request_reads_keeps_its_place(self) -> None:
        cache = self.old()
        lock = self.added(cache, ABCDEF[:4], [10, 11])
        reader = cache.lock(cache.match_prefix(ABCDEF[:4]).node)
        lock.release(evict_first_from=0)
        reader.release()
        assert cache.evict(1) == [20]

    def test_what_two_requests_added_one_behind_the_other_goes_as_a_whole(self) -> None:
        cache = self.old()
        first = self.added(cache, ABCDEF[:4], [10, 11])
        self.added(cache, ABCDEF[:6], [12], num_found=2).release(evict_first_from=2)
        first.release(evict_first_from=0)
        assert sorted(cache.evict(3)) == [10, 11, 12]

    def test_what_is_used_again_is_a_prefix_like_any_other(self) -> None:
        cache = self.old()
        self.added(cache, ABCDEF[:4], [10, 11]).release(evict_first_from=0)
        cache.match_prefix(ABCDEF[:4])
        assert cache.evict(1) == [20]


def test_pages_and_ids_of_an_insert_must_agree() -> None:
    with pytest.raises(AssertionError):
        RadixCache(2).insert([1, 1, 2], [10])
    with pytest.raises(AssertionError):
        RadixCache(2).insert([1, 1], [10, 11])
