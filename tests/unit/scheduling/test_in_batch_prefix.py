"""In-batch prefix caching on the token engine: one computes the shared prefix, the others find it cached."""

from __future__ import annotations

import pytest

from tests.prop.stepping import Stepping, new_req, rids

PREFIX = list(range(100, 140))
"""40 tokens, 10 pages."""


def sharers(count: int, num_new: int = 3, suffix: int = 5) -> list:  # type: ignore[type-arg]
    return [
        new_req(f"s{i}", PREFIX + [200 + 10 * i + j for j in range(suffix)], num_new) for i in range(count)
    ]


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
