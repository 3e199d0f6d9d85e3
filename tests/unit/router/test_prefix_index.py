from __future__ import annotations

from router.prefix_index import PrefixIndex
from shared.protocol.block_hash import block_hashes
from shared.protocol.messages import CacheEvents

A, B, C = 11, 22, 33


def test_blocks_count_from_the_start_and_end_at_the_first_that_is_missing() -> None:
    index = PrefixIndex()
    assert index.apply(CacheEvents(0, (A, C), (), reset=True))
    assert index.num_blocks([A, B, C]) == 1
    assert index.apply(CacheEvents(1, (B,), ()))
    assert index.num_blocks([A, B, C]) == 3
    assert index.apply(CacheEvents(2, (), (A,)))
    assert index.num_blocks([A, B, C]) == 0
    assert index.num_blocks([]) == 0


def test_nothing_is_known_before_everything_was_sent() -> None:
    index = PrefixIndex()
    assert index.apply(CacheEvents(7, (A,), ()))  # asked for already: by RouterHello
    assert index.num_blocks([A]) == 0


def test_a_gap_empties_the_index_asks_once_and_waits_for_everything() -> None:
    index = PrefixIndex()
    index.apply(CacheEvents(4, (A, B), (), reset=True))
    assert not index.apply(CacheEvents(6, (C,), ()))
    assert index.num_blocks([A]) == 0
    assert index.apply(CacheEvents(7, (A,), ())), "asked a second time"
    assert index.num_blocks([A]) == 0
    assert index.apply(CacheEvents(7, (A, C), (), reset=True))
    assert index.num_blocks([A, C]) == 2
    assert index.apply(CacheEvents(8, (), (C,)))
    assert index.num_blocks([A, C]) == 1


def test_a_hash_depends_on_all_that_came_before_and_on_the_extra_key() -> None:
    one = list(block_hashes([1, 2, 3, 4, 5, 6, 7], 2))
    assert len(one) == 3  # whole pages only
    assert list(block_hashes([1, 2, 3, 4], 2)) == one[:2]
    assert len({*one, *block_hashes([9, 2, 3, 4, 5, 6], 2)}) == 6
    assert len({*one, *block_hashes([1, 2, 3, 4, 5, 6], 2, "tenant")}) == 6
    assert len({*one, *block_hashes([1, 2, 3, 4, 5, 6], 3)}) == 5
