from __future__ import annotations

from typing import Any

from router.dispatch.node import MAX_PONGS_BEFORE_ASKING, PrefixIndex
from shared.protocol.block_hash import BlockHashes, block_hashes
from shared.protocol.messages import CacheEvents

A, B, C = 11, 22, 33


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


def test_a_count_from_a_known_minimum_is_the_same_count() -> None:
    index = PrefixIndex()
    index.apply(CacheEvents(0, (A, B), (), reset=True))
    assert [index.num_blocks([A, B, C], at_least) for at_least in (0, 1, 2, 3)] == [2, 2, 2, 0]


def test_a_lost_answer_is_asked_for_again_now_and_then() -> None:
    index = PrefixIndex()
    index.apply(CacheEvents(0, (A,), (), reset=True))
    assert not index.apply(CacheEvents(2, (), ()))
    for n in range(3, 9):
        assert index.apply(CacheEvents(n, (B,), ()))
    assert [n for n in range(1, 7) if not index.compare(9)] == [2, 6]
    assert index.apply(CacheEvents(500, (A, B), (), reset=True))
    assert index.num_blocks([A, B]) == 2


def test_a_node_without_events_is_not_asked() -> None:
    assert all(PrefixIndex().compare(None) for _ in range(100))


def test_a_lost_last_event_shows_at_the_second_pong() -> None:
    index = PrefixIndex()
    index.apply(CacheEvents(4, (A, B), (), reset=True))
    assert all(index.compare(seq) for seq in (4, 4, 3))
    assert index.compare(5)
    assert index.num_blocks([A, B]) == 2, "one pong may be ahead of what is being made"
    assert not index.compare(5)
    assert index.num_blocks([A, B]) == 0, "what it lost may be just what it had"
    index.apply(CacheEvents(5, (A,), (), reset=True))
    assert all(index.compare(5) for _ in range(10))
    assert index.num_blocks([A, B]) == 1


def test_an_event_between_two_pongs_makes_up_for_the_first() -> None:
    index = PrefixIndex()
    index.apply(CacheEvents(4, (A,), (), reset=True))
    for seq in range(5, 30):
        assert index.compare(seq)
        assert index.apply(CacheEvents(seq, (), ()))


def test_a_node_that_answers_pings_only_is_asked_ever_less_often() -> None:
    """It may be in a step of many seconds, and would answer every question after it."""
    index = PrefixIndex()
    asked = [n for n in range(1, 1000) if not index.compare(7)]
    assert asked[:4] == [2, 6, 14, 30]
    assert asked[-1] - asked[-2] == MAX_PONGS_BEFORE_ASKING
    index.apply(CacheEvents(7, (), (), reset=True))
    index.apply(CacheEvents(9, (), ()))
    assert [n for n in range(1, 7) if not index.compare(9)] == [2, 6], "patience is short again"


def test_hashes_are_made_when_they_are_looked_at() -> None:
    class Counted(list[int]):
        num_reads = 0

        def __getitem__(self, at: Any) -> Any:
            self.num_reads += 1
            return super().__getitem__(at)

    ids = Counted(range(1000))
    hashes, all_of_them = BlockHashes(ids, 3, "tenant"), list(block_hashes(range(1000), 3, "tenant"))
    assert len(hashes) == 333
    assert (hashes[4], ids.num_reads) == (all_of_them[4], 5)
    assert (hashes[2], ids.num_reads) == (all_of_them[2], 5)
    assert PrefixIndex().num_blocks(hashes) == 0
    assert ids.num_reads == 5
    assert hashes[-1] == all_of_them[-1]
    assert hashes[5:9] == all_of_them[5:9]
    assert list(hashes) == all_of_them
