"""Requests of known length, followed to their ends: against a simulation of every step."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from shared.kvcache.radix_cache import PrefixLock, RadixCache, TreeNode
from shared.scheduling.prefill_adder import KnownEnd, fits_to_the_end


def every_step(ends: list[KnownEnd], free: int, page_size: int) -> bool:
    """Each request takes a token a step; what it held comes back at the end of the step after its last."""
    readers = {node: node.lock_ref for end in ends for node in end.nodes}
    held = {i: -(-end.kv_len // page_size) for i, end in enumerate(ends)}
    started_with = dict(held)
    lengths = {i: end.kv_len for i, end in enumerate(ends)}
    steps_left = {i: end.num_steps for i, end in enumerate(ends)}
    while held:
        done = [i for i in held if steps_left[i] == 0]
        for i in list(held):
            if steps_left[i]:
                steps_left[i] -= 1
                lengths[i] += 1
                if -(-lengths[i] // page_size) > held[i]:
                    held[i] += 1
                    free -= 1
        if free < 0:
            return False
        for i in done:
            free += ends[i].own_pages + held.pop(i) - started_with[i]
            for node in ends[i].nodes:
                readers[node] -= 1
                if readers[node] == 0:
                    free += len(node.pages)
    return True


def locked_prefixes(rng: random.Random, page_size: int, count: int) -> list[PrefixLock]:
    cache = RadixCache(page_size)
    page, locks = 0, []
    for _ in range(count):
        num_pages = rng.randrange(5)
        ids = [t for _ in range(num_pages) for t in [rng.randrange(2)] * page_size]
        inserted = cache.insert(ids, range(page, page + num_pages))
        page += num_pages
        locks.append(cache.lock(inserted.node))
    return locks


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_it_is_what_happens_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    page_size, count = rng.choice([1, 2, 3, 8]), rng.randint(1, 7)
    ends = []
    for lock in locked_prefixes(rng, page_size, count):
        nodes: tuple[TreeNode, ...] = tuple(lock.nodes())
        num_tree_pages = sum(len(node.pages) for node in nodes)
        kv_len = num_tree_pages * page_size + rng.randint(1, 20)
        own = -(-kv_len // page_size) - num_tree_pages
        ends.append(KnownEnd(kv_len, rng.randrange(30), own, nodes))
    answers = [fits_to_the_end(ends, free, page_size) for free in range(200)]
    assert answers == [every_step(ends, free, page_size) for free in range(200)]
    assert answers == sorted(answers), "more room never hurts"


def test_the_only_request_may_fill_the_pool_to_the_last_page() -> None:
    end = KnownEnd(kv_len=5, num_steps=11, own_pages=2, nodes=())
    assert fits_to_the_end([end], 2, 4)
    assert not fits_to_the_end([end], 1, 4)


def test_what_ends_first_is_there_for_the_others() -> None:
    """Two of 4 + 4 tokens and one of 4 + 12 need 3 + 1 pages at most, not 5."""
    short, long_ = KnownEnd(4, 4, 1, ()), KnownEnd(4, 12, 1, ())
    assert fits_to_the_end([short, short, long_], 4, 4)
    assert not fits_to_the_end([short, short, long_], 3, 4)


def test_a_page_that_somebody_else_reads_does_not_come_back() -> None:
    cache = RadixCache(4)
    node = cache.insert([1, 2, 3, 4], [0]).node
    mine, other = cache.lock(node), cache.lock(node)
    ends = [KnownEnd(5, 1, 1, tuple(mine.nodes())), KnownEnd(4, 9, 1, ())]
    assert not fits_to_the_end(ends, 1, 4)
    assert fits_to_the_end(ends, 1, 4, released=other.nodes()), "the other one is about to go"
