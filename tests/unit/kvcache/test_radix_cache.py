from __future__ import annotations

import pytest

from shared.kvcache.radix_cache import PrefixLock, RadixCache


def cached(*prefixes: tuple[list[int], list[int]], page_size: int = 2) -> RadixCache:
    cache = RadixCache(page_size)
    for ids, pages in prefixes:
        cache.insert(ids, pages)
    return cache


ABCDEF = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_an_empty_tree_matches_nothing() -> None:
    match = RadixCache(2).match_prefix([1, 2, 3])
    assert match.pages == []


def test_only_whole_pages_match() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    assert cache.match_prefix(ABCDEF[:5]).pages == [10, 11]
    assert cache.match_prefix(ABCDEF[:1]).pages == []
    assert cache.match_prefix([*ABCDEF, 9, 9]).pages == [10, 11, 12, 13, 14, 15]
    assert cache.match_prefix([1, 1, 2, 9, 3, 3]).pages == [10]


def test_a_match_inside_a_node_splits_it_and_moves_no_page() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    match = cache.match_prefix(ABCDEF[:4])
    assert match.node.pages == [10, 11]
    (child,) = match.node.children.values()
    assert child.pages == [12, 13, 14, 15]
    assert child.parent is match.node
    assert sorted(cache.pages()) == [10, 11, 12, 13, 14, 15]
    assert cache.num_evictable_pages == 6


def test_branches_share_their_common_pages() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    inserted = cache.insert([1, 1, 2, 2, 7, 7], [20, 21, 22])
    assert inserted.pages == [10, 11, 22]
    assert inserted.duplicates == [20, 21]
    assert cache.match_prefix([1, 1, 2, 2, 7, 7]).pages == [10, 11, 22]
    assert cache.match_prefix(ABCDEF).pages == [10, 11, 12, 13, 14, 15]
    assert cache.num_evictable_pages == 7


def test_inserting_the_same_again_returns_every_page_as_duplicate() -> None:
    cache = cached(([1, 1, 2, 2], [10, 11]))
    inserted = cache.insert([1, 1, 2, 2], [20, 21])
    assert (inserted.pages, inserted.duplicates) == ([10, 11], [20, 21])
    assert cache.insert([1, 1, 2, 2], [10, 11]).duplicates == []
    assert cache.num_evictable_pages == 2


def test_a_prefix_of_a_node_is_split_by_an_insert() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    inserted = cache.insert(ABCDEF[:4], [20, 21])
    assert (inserted.pages, inserted.duplicates) == ([10, 11], [20, 21])
    assert inserted.node.pages == [10, 11]


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


def test_a_page_is_evicted_with_all_that_continues_it() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]), ([1, 1, 2, 2, 7, 7], [10, 11, 22]))
    assert sorted(cache.evict_behind(ABCDEF, 1)) == [11, 12, 13, 14, 15, 22]
    assert cache.match_prefix(ABCDEF).pages == [10]
    assert cache.evict_behind(ABCDEF, 1) == []
    assert cache.evict_behind([9, 9], 0) == []
    assert cache.evict_behind([1, 1], 1) == []
    assert cache.evict(5) == [10]
    assert cache.num_evictable_pages == 0


def test_what_is_locked_behind_an_evicted_page_stays_until_it_is_unlocked() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    lock = cache.lock(cache.match_prefix(ABCDEF[:6]).node)
    assert cache.evict_behind(ABCDEF, 1) == [13, 14, 15]
    lock.release()
    assert cache.evict_behind(ABCDEF, 1) == [11, 12]
    assert cache.evict(5) == [10]


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


def test_a_split_keeps_the_readers_of_both_halves() -> None:
    cache = cached((ABCDEF, [10, 11, 12, 13, 14, 15]))
    lock = cache.lock(cache.match_prefix(ABCDEF).node)
    cache.match_prefix(ABCDEF[:4])
    assert cache.num_protected_pages == cache.count_locked_pages() == 6
    lock.release()
    assert cache.num_protected_pages == cache.count_locked_pages() == 0
    assert len(cache.evict(99)) == 6


def test_moving_a_lock_protects_the_longer_prefix() -> None:
    cache = cached((ABCDEF[:4], [10, 11]))
    lock = cache.lock(cache.match_prefix(ABCDEF[:4]).node)
    lock.move_to(cache.insert(ABCDEF, [10, 11, 12, 13, 14, 15]).node)
    assert cache.num_protected_pages == 6
    lock.release()
    assert cache.num_protected_pages == 0


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


def test_different_extra_keys_share_nothing() -> None:
    cache = cached(([1, 1, 2, 2], [10, 11]))
    assert cache.match_prefix([1, 1, 2, 2], "tenant").pages == []
    assert cache.insert([1, 1, 2, 2], [20, 21], "tenant").duplicates == []
    assert cache.match_prefix([1, 1, 2, 2], "tenant").pages == [20, 21]
    assert cache.match_prefix([1, 1, 2, 2]).pages == [10, 11]
    assert cache.match_prefix([1, 1, 2, 2], "other").pages == []


def test_page_size_one() -> None:
    cache = cached(([1, 2, 3], [10, 11, 12]), page_size=1)
    assert cache.match_prefix([1, 2, 9]).pages == [10, 11]


def test_pages_and_ids_of_an_insert_must_agree() -> None:
    with pytest.raises(AssertionError):
        RadixCache(2).insert([1, 1, 2], [10])
    with pytest.raises(AssertionError):
        RadixCache(2).insert([1, 1], [10, 11])
