"""In-batch prefix caching on the token engine: one computes the shared prefix, the others find it cached."""

from __future__ import annotations

import pytest

from shared.scheduling.schedule_policy import POLICIES
from tests.prop.stepping import Stepping, new_req, rids

PREFIX = list(range(100, 140))
"""40 tokens, 10 pages."""


def sharers(count: int, num_new: int = 3, suffix: int = 5) -> list:  # type: ignore[type-arg]
    return [
        new_req(f"s{i}", PREFIX + [200 + 10 * i + j for j in range(suffix)], num_new) for i in range(count)
    ]


def prompt_tokens(stepping: Stepping) -> int:
    """Run to the end; the prompt tokens that forwards computed, each counted as often as it was."""
    total = 0
    while stepping.live or stepping.launcher.in_flight is not None:
        batch = stepping.step()
        total += sum(item.length for item in batch.extends) if batch is not None else 0
    stepping.run()
    return total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_others_find_it_cached(policy: str, overlap: bool) -> None:
    stepping = Stepping(schedule_policy=policy, overlap=overlap)
    stepping.add(*sharers(4))
    (first,) = rids(stepping.step())
    if overlap:  # its pages are not committed yet; it decodes meanwhile
        assert rids(stepping.step()) == [first]
    assert {first, *rids(stepping.step())} == {"s0", "s1", "s2", "s3"}
    stepping.run()
    assert {rid: req.cached_tokens for rid, req in stepping.done.items()} == {
        f"s{i}": 0 if f"s{i}" == first else 40 for i in range(4)
    }


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_new", [1, 32], ids=["prefill node", "one node doing both"])
def test_a_prefix_longer_than_a_chunk_is_computed_once(policy: str, overlap: bool, num_new: int) -> None:
    """16 requests at once share 896 tokens, with 64 of their own; a chunk has 512.

    When each that found room in a batch went at once, 2304 tokens were computed, with overlap 2816.
    """
    shared = [i % 900 for i in range(896)]
    stepping = Stepping(schedule_policy=policy, overlap=overlap, page_size=16, num_tokens=32_768)
    stepping.add(
        *(new_req(f"s{i:02d}", shared + [(7 * i + j) % 900 for j in range(64)], num_new) for i in range(16))
    )
    assert prompt_tokens(stepping) == 896 + 16 * 64
    assert sorted(stepping.admitted_at, key=stepping.admitted_at.__getitem__) == sorted(stepping.done)


def test_without_a_cache_nobody_waits() -> None:
    stepping = Stepping(disable_radix_cache=True)
    stepping.add(*sharers(3))
    assert rids(stepping.step()) == ["s0", "s1", "s2"]
    stepping.run()


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_strangers_do_not_wait(policy: str) -> None:
    stepping = Stepping(schedule_policy=policy)
    first, second = sharers(2)
    stranger, tenant = new_req("x", range(300, 340), 3), new_req("t", PREFIX, 3, extra_key="another")
    stepping.add(first, second, stranger, tenant)
    assert rids(stepping.step()) == ["s0", "x", "t"]
    stepping.run()


def test_while_the_first_is_chunked_the_others_wait() -> None:
    """Its first chunk is shared as soon as it is committed; what is still missing is less than the threshold."""
    stepping = Stepping(schedule_policy="lpm", chunked_prefill_size=16, num_tokens=2048)
    long_, other = sharers(2, suffix=9)
    stepping.add(long_, other)
    seen = [rids(stepping.step()) for _ in range(5)]
    assert seen[:4] == [["s0"], ["s0"], ["s0"], ["s0", "s1"]]
    stepping.run()
    assert stepping.done["s1"].cached_tokens >= 32


def test_what_counts_is_what_is_not_cached_yet() -> None:
    """40 tokens are cached: they are no reason to wait, nor a reason not to wait for 40 more."""
    stepping = Stepping()
    stepping.add(new_req("warm", PREFIX + [1], 1))
    stepping.run()
    stepping.add(*sharers(2))
    assert rids(stepping.step()) == ["s0", "s1"]
    more = PREFIX + list(range(400, 440))
    stepping.add(new_req("a", [*more, 1, 2], 2), new_req("b", [*more, 3, 4], 2))
    assert rids(stepping.step()) == ["a"]
    stepping.run()


def test_who_counts_more_does_not_wait_for_who_counts_less() -> None:
    stepping = Stepping(enable_priority_scheduling=True)
    (low,) = sharers(1)
    high = new_req("s1", [*PREFIX, *range(210, 215)], 3, priority=1)
    stepping.add(low)
    assert rids(stepping.step()) == ["s0"]
    stepping.add(high)
    assert rids(stepping.step()) == ["s1"]
    stepping.run()


@pytest.mark.parametrize(("limit", "goes"), [(4, True), (3, False)])
def test_a_stranger_goes_first_only_where_there_is_a_slot_for_all(limit: int, goes: bool) -> None:
    stepping = Stepping(max_running_requests=limit)
    stepping.add(*sharers(3, num_new=20), new_req("x", range(700, 710), 20))
    assert rids(stepping.step()) == (["s0", "x"] if goes else ["s0"])
    stepping.run()


@pytest.mark.parametrize(("num_pages", "goes"), [(24, True), (23, False)])
def test_or_pages_for_all(num_pages: int, goes: bool) -> None:
    """12 pages for the first, 2 more for its follower, 10 for the stranger."""
    stepping = Stepping(num_tokens=4 * num_pages)
    assert stepping.ledger.num_available_pages == num_pages
    stepping.add(*sharers(2, num_new=1), new_req("x", range(700, 740), 1))
    assert rids(stepping.step()) == (["s0", "x"] if goes else ["s0"])
    stepping.run()


@pytest.mark.parametrize(("length", "goes"), [(19, True), (20, False)])
def test_a_stranger_goes_first_only_as_a_whole(length: int, goes: bool) -> None:
    """64 tokens are a chunk, 45 of them the first's: further chunks of a stranger would be in the follower's way."""
    stepping = Stepping(chunked_prefill_size=64)
    stepping.add(*sharers(2), new_req("x", range(700, 700 + length), 3))
    assert rids(stepping.step()) == (["s0", "x"] if goes else ["s0"])
    stepping.run()


@pytest.mark.parametrize(("threshold", "together"), [(40, False), (41, True)])
def test_the_threshold_of_what_is_shared(threshold: int, together: bool) -> None:
    stepping = Stepping(in_batch_prefix_caching_deprioritize_threshold=threshold)
    stepping.add(*sharers(2))
    assert rids(stepping.step()) == (["s0", "s1"] if together else ["s0"])
    stepping.run()


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("stage", ["waiting", "chunked", "in flight"])
def test_the_end_of_the_first_lets_the_others_go(stage: str, policy: str) -> None:
    stepping = Stepping(schedule_policy=policy, chunked_prefill_size=16 if stage == "chunked" else 512)
    first, *others = sharers(3)
    stepping.add(first, *others)
    if stage != "waiting":
        assert rids(stepping.step()) == ["s0"]
    stepping.end(first)
    assert rids(stepping.step())[0] == "s1"
    del stepping.done["s0"]
    stepping.run()


def test_a_first_that_does_not_fit_holds_nobody_up_for_ever() -> None:
    """The pool has room for one at a time while `big` runs; the first sharer is the one that needs most."""
    stepping = Stepping(schedule_policy="lpm", num_tokens=240, page_size=4)
    stepping.add(new_req("big", range(500, 600), 60))
    stepping.step()
    greedy = new_req("greedy", PREFIX + [9], 150)
    stepping.add(greedy, *sharers(3))
    for _ in range(10):
        assert "greedy" not in rids(stepping.step())
    stepping.run()
    assert stepping.batcher.num_retractions == 0


def test_with_the_first_retracted_the_prefix_is_still_there_or_computed_again() -> None:
    stepping = Stepping(schedule_policy="lpm", num_tokens=96, schedule_conservativeness=0.0)
    stepping.add(*sharers(4, num_new=30))
    stepping.run()
    assert stepping.batcher.num_retractions > 0
