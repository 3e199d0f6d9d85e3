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


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_others_find_it_cached(policy: str, overlap: bool) -> None:
    stepping = Stepping(schedule_policy=policy, overlap=overlap)
    stepping.add(*sharers(4))
    assert rids(stepping.step()) == ["s0"]
    if overlap:  # its pages are not committed yet; it decodes meanwhile
        assert rids(stepping.step()) == ["s0"]
    assert rids(stepping.step()) == ["s1", "s2", "s3"]
    stepping.run()
    assert [stepping.done[f"s{i}"].cached_tokens for i in range(4)] == [0, 40, 40, 40]


@pytest.mark.parametrize("policy", ["fcfs", "lof", "random", "routing-key"])
def test_a_policy_that_knows_no_cache_lets_all_go_at_once(policy: str) -> None:
    stepping = Stepping(schedule_policy=policy)
    stepping.add(*sharers(4))
    assert sorted(rids(stepping.step())) == ["s0", "s1", "s2", "s3"]
    stepping.run()


def test_strangers_do_not_wait() -> None:
    stepping = Stepping(schedule_policy="lpm")
    first, second = sharers(2)
    stranger, tenant = new_req("x", range(300, 340), 3), new_req("t", PREFIX, 3)
    tenant.extra_key = "another"
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


@pytest.mark.parametrize(("check", "cached_first"), [(32, True), (40, False)])
def test_enough_that_is_cached_is_no_reason_to_wait(check: int, cached_first: bool) -> None:
    """40 tokens are cached; 40 more are shared. Only who has no more cached than the threshold waits for them."""
    stepping = Stepping(schedule_policy="lpm", in_batch_prefix_check_threshold=check)
    stepping.add(new_req("warm", PREFIX + [1], 1))
    stepping.run()
    more = PREFIX + list(range(400, 440))
    stepping.add(new_req("a", [*more, 1, 2], 2), new_req("b", [*more, 3, 4], 2))
    assert rids(stepping.step()) == (["a", "b"] if cached_first else ["a"])
    stepping.run()


@pytest.mark.parametrize(("threshold", "together"), [(40, False), (41, True)])
def test_the_threshold_of_what_is_shared(threshold: int, together: bool) -> None:
    stepping = Stepping(schedule_policy="lpm", in_batch_prefix_deprioritize_threshold=threshold)
    stepping.add(*sharers(2))
    assert rids(stepping.step()) == (["s0", "s1"] if together else ["s0"])
    stepping.run()


@pytest.mark.parametrize("stage", ["waiting", "chunked", "in flight"])
def test_the_end_of_the_first_lets_the_others_go(stage: str) -> None:
    stepping = Stepping(schedule_policy="lpm", chunked_prefill_size=16 if stage == "chunked" else 512)
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
