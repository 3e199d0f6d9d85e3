"""What a follower is told of a RadixCache is what the cache holds, whatever happens to either."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.node import PrefixIndex
from shared.kvcache.radix_cache import CacheChanges, PrefixLock, RadixCache
from shared.protocol.block_hash import block_hashes
from shared.protocol.messages import CacheEvents

TOKENS = st.lists(st.integers(0, 1), max_size=12)
KEYS = st.sampled_from(["", "a", "b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), TOKENS, KEYS),
        st.tuples(st.just("match"), TOKENS, KEYS),
        st.tuples(st.just("lock"), TOKENS, KEYS),
        st.tuples(st.sampled_from(["unlock", "evict first"]), st.integers(0, 5), KEYS),
        st.tuples(st.just("evict"), st.integers(1, 4), KEYS),
        st.tuples(st.just("evict_behind"), TOKENS, KEYS),
        st.tuples(st.just("tell"), st.booleans(), KEYS),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(steps=STEPS, page_size=st.sampled_from([1, 2, 3]))
def test_a_follower_knows_exactly_what_can_be_matched(
    steps: list[tuple[str, list[int] | int | bool, str]], page_size: int
) -> None:
    cache = RadixCache(page_size, CacheChanges())
    follower, page_ids, seq = PrefixIndex(), itertools.count(), 0
    follower.apply(CacheEvents(0, (), (), reset=True))
    locks: list[PrefixLock] = []
    for kind, what, extra_key in steps:
        match kind, what:
            case "insert", list(ids):
                whole = ids[: len(ids) // page_size * page_size]
                cache.insert(whole, [next(page_ids) for _ in range(len(whole) // page_size)], extra_key)
            case "match", list(ids):
                cache.match_prefix(ids, extra_key)
            case "lock", list(ids):
                locks.append(cache.lock(cache.match_prefix(ids, extra_key).node))
            case "unlock", int(at) if at < len(locks):
                locks.pop(at).release()
            case "evict first", int(at) if at < len(locks):
                locks.pop(at).release(evict_first_from=at % 2)
            case "evict", int(count):
                cache.evict(count)
            case "evict_behind", list(ids):
                cache.evict_behind(ids, len(ids) // page_size // 2, extra_key)
            case "tell", bool(arrives):
                seq += 1
                assert cache.changes is not None
                message = CacheEvents(seq, *cache.changes.take())
                if arrives and not follower.apply(message):
                    follower.apply(CacheEvents(seq, tuple(cache.hashes()), (), reset=True))
                if arrives:
                    check(cache, follower)
    check_hashes(cache)


def check(cache: RadixCache, follower: PrefixIndex) -> None:
    assert len(follower) == len(cache.hashes()) == len(cache.pages())
    for extra_key in ("", "a", "b"):
        for ids in ([0] * 12, [1] * 12, [0, 1] * 6, [1, 0] * 6, [0, 0, 1] * 4, [1, 1, 0] * 4):
            num_cached = cache.peek(ids, len(ids), extra_key).num_pages
            hashes = list(block_hashes(ids, cache.page_size, extra_key))
            assert follower.num_blocks(hashes) == num_cached


def check_hashes(cache: RadixCache) -> None:
    assert len(set(cache.hashes())) == len(cache.hashes()) == len(cache.pages())
