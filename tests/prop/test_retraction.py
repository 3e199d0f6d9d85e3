"""Retraction over the real ledger, launcher and host pages, each way: outputs right, every page home, in order."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shared.kvcache.allocator import PageCopy
from shared.scheduling.victims import RetractMode
from shared.timeline import ReqStage
from tests.prop.stepping import Stepping, new_req
from tests.token_engine import reference_tokens

POOL_TOKENS = 64


def new_driver(policy: str, *, overlap: bool, num_tokens: int = POOL_TOKENS, **options: Any) -> Stepping:
    """A small pool, from which requests are taken without regard to their outputs."""
    defaults = {
        "host_tokens": 256,
        "chunked_prefill_size": 16,
        "max_running_requests": 8,
        "schedule_conservativeness": 0.0,
        "num_reserved_decode_tokens": 0,
    }
    options = {**defaults, "retract_policy": policy, **options}
    return Stepping(num_tokens=num_tokens, overlap=overlap, **options)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50)
def test_every_output_is_right_and_every_page_comes_home(seed: int) -> None:
    """Beside arrivals, aborts, and retraction at any step."""
    rng = random.Random(seed)
    retracts = rng.random() < 0.3
    driver = new_driver(
        rng.choice(["auto", "host", "recompute"]),
        page_size=rng.choice([1, 2, 4, 16]),
        num_tokens=rng.choice([64, 96, 160]),
        host_tokens=rng.choice([16, 40, 256]),
        retract_every=rng.choice([0, 0, 2, 3, 7]),
        num_reserved_decode_tokens=rng.choice([0, 4, 32]),
        retracted_wait_steps=rng.choice([0, 1, 16]),
        max_running_requests=rng.choice([2, 5, 12]),
        disable_radix_cache=rng.random() < 0.2,
        overlap=rng.random() < 0.6,
        window=rng.choice([None, 1, 6, 8, 9, 30]),
        window_tokens=rng.choice([64, 80, 160]),
    )
    driver.retraction.costs.prefill.observe(rng.choice([1, 1e9]), 10)  # for `auto`: either may be cheaper
    shared = [rng.randrange(997) for _ in range(20)]
    pending = []
    for i in range(14):
        ids = shared[: rng.randrange(20)] + [rng.randrange(997) for _ in range(rng.randint(1, 20))]
        pending.append(new_req(f"r{i:02d}", ids, rng.randint(1, min(40, 64 - len(ids))), ignore_eos=False))
    for _ in range(4000):
        if not pending and not driver.live:
            break
        if pending and rng.random() < 0.5:
            driver.add(pending.pop())
        if driver.live and rng.random() < 0.02:
            driver.end(driver.live[rng.choice(sorted(driver.live))])
        if retracts and driver.batcher.running_batch and rng.random() < 0.1:  # as preemption does
            driver.batcher._retract(rng.choice(driver.batcher.running_batch))
        driver.step()
    driver.run()
    assert len(driver.done) == 14


def ids_of(number: int) -> list[int]:
    """A prompt of up to 13 tokens."""
    return [100 + 13 * number + j for j in range(13)]


def full_house(policy: str, *, overlap: bool = False, **options: Any) -> Stepping:
    """Requests that fit into the pool when they start and outgrow it together."""
    driver = new_driver(policy, overlap=overlap, **options)
    for i in range(4):
        driver.add(new_req(f"r{i}", ids_of(i)[:10], 30))
    return driver


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("policy", "used", "unused"),
    [("host", "num_host", "num_recompute"), ("recompute", "num_recompute", "num_host")],
)
def test_a_policy_takes_its_own_way(policy: str, used: str, unused: str, overlap: bool) -> None:
    driver = full_house(policy, overlap=overlap)
    driver.run()
    count = driver.retraction.count
    assert getattr(count, used) > 0 and getattr(count, unused) == 0
    assert (driver.engine.stream.num_copies > 0) == (policy == "host")


@pytest.mark.parametrize(("tokens_per_s", "used"), [(1e-3, "num_host"), (1e12, "num_recompute")])
def test_auto_takes_the_cheaper_way(tokens_per_s: float, used: str) -> None:
    driver = full_house("auto")
    for _ in range(200):
        driver.retraction.costs.prefill.observe(tokens_per_s, 1)
    driver.run()
    count = driver.retraction.count
    assert getattr(count, used) == count.num_host + count.num_recompute > 0


def test_auto_recomputes_when_the_host_pool_is_full() -> None:
    driver = full_house("auto", host_tokens=4)
    for _ in range(200):
        driver.retraction.costs.prefill.observe(1e-3, 1)
    driver.run()
    assert driver.retraction.count.num_host == 0 < driver.retraction.count.num_recompute


@pytest.mark.parametrize("overlap", [False, True])
def test_host_waits_in_place_when_the_host_pool_is_full(overlap: bool) -> None:
    """As long as anybody can go on, who finds no room on the host keeps its KV and sits steps out."""
    driver = new_driver("host", host_tokens=4, overlap=overlap)
    for i in range(4):  # one needs a page each step
        driver.add(new_req(f"r{i}", ids_of(i)[: 8 + i], 30))
    while not driver.retraction.count.num_waits:
        driver.step()
        assert driver.worked
    waiting = driver.retraction._sitting_out
    assert waiting and all(req in driver.batcher.running_batch and req.kv is not None for req in waiting)
    assert driver.retraction.count.num_recompute == 0
    driver.run()
    assert driver.retraction.count.num_host == 0


def test_victims_are_those_who_lose_least() -> None:
    driver = new_driver("recompute", num_tokens=256, overlap=False)
    for rid, num_input, num_output in [("d", 5, 2), ("b", 9, 2), ("a", 9, 2), ("c", 20, 3)]:
        req = new_req(rid, [1] * (num_input + num_output), 30)
        req.num_input_ids = num_input
        driver.batcher.running_batch.append(req)
    order = driver.retraction._victims.in_order(driver.batcher.running_batch, 0)
    assert [req.key.rid for req in order] == ["a", "b", "d", "c"]


def test_lower_priority_is_retracted_first_where_it_counts() -> None:
    for enabled, expected in [(False, "few"), (True, "low")]:
        driver = Stepping(num_tokens=256, enable_priority_scheduling=enabled)
        few, low = new_req("few", [1, 2], 9, priority=5), new_req("low", [1, 2, 3], 9)
        few.arrival_step = low.arrival_step = 0
        low.num_input_ids = 2
        assert driver.retraction._victims.in_order([few, low], 0)[0].key.rid == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["auto", "host", "recompute"])
def test_the_last_running_request_waits_for_pages_and_keeps_its_own(policy: str, overlap: bool) -> None:
    """What holds the others may be a transfer: giving its own pages up would help the request to nothing."""
    driver = new_driver(policy, overlap=overlap)
    driver.add(new_req("last", list(range(10)), 40))
    while driver.live["last"].output_len < 5:
        driver.step()
    ledger = driver.ledger
    kv = ledger.admit(ledger.match_prefix([500], ""), "")
    assert kv is not None and ledger.grow(kv, 4 * ledger.num_available_pages)
    driver.step()
    while driver.worked:
        assert driver.live
        driver.step()
    assert driver.retraction.count.num_waits > 0
    ledger.cache_finished_req(kv, ())
    driver.run()
    assert driver.batcher.num_retractions == 0


@pytest.mark.parametrize("policy", ["auto", "host", "recompute"])
def test_pages_that_come_home_with_the_forward_in_flight_are_waited_for(policy: str) -> None:
    """Two requests of 20 tokens fill the pool, and need the pages of a third while its last token is in flight."""
    driver = new_driver(policy, num_tokens=40, overlap=True)
    for i, (num_ids, num_new) in enumerate([(5, 5), (8, 12), (8, 12)]):
        driver.add(new_req(f"r{i}", [200 * i + j for j in range(num_ids)], num_new))
    driver.run()
    assert (driver.batcher.num_retractions, driver.retraction.count.num_waits) == (0, 1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["host", "recompute"])
def test_retracted_requests_resume_first_come_first_served(policy: str, overlap: bool) -> None:
    driver = full_house(policy, overlap=overlap)
    retracted: list[str] = []
    resumed: list[str] = []
    away: set[str] = set()
    while driver.live:
        driver.step()
        now = [r.key.rid for r in driver.retraction._queue]
        came_back = [rid for rid in retracted if rid in away and rid not in now]
        resumed += came_back
        if came_back and now:  # whoever came back had waited at least as long as everybody who still waits
            since = {req.key.rid: req.stalled_since for req in [*driver.live.values(), *driver.done.values()]}
            assert max(since[rid] for rid in came_back) <= min(since[rid] for rid in now)
        away = set(now)
        retracted += [rid for rid in now if rid not in retracted]
    assert len(resumed) >= 2


def test_a_copy_that_fails_fails_its_request_alone() -> None:
    driver = full_house("host", overlap=True, may_fail=True)
    driver.engine.stream.fail_copies = [False, True]
    driver.run()
    assert len(driver.failed) == 1


def test_what_a_failed_copy_left_behind_is_not_shared() -> None:
    """A page that the copy back never reached must not come out of the RadixCache later."""
    driver = full_house("host", overlap=True, may_fail=True)
    while driver.engine.stream.num_copies < 1:
        driver.step()
    driver.engine.stream.fail_copies = [True] * 100
    driver.run()
    driver.engine.stream.fail_copies = []
    assert driver.failed
    for rid in sorted(driver.failed):
        ids = ids_of(int(rid[1]))[:10]
        driver.add(new_req(f"again-{rid}", [*ids, *reference_tokens(ids, 25, eos=None)], 3))
        driver.run()


@pytest.mark.parametrize("num_before", range(4))
def test_what_is_computed_over_a_copy_back_that_failed_is_dropped(num_before: int) -> None:
    """The step behind the copy reads pages that the copy never wrote: its token is wrong, and so is its KV."""
    driver = full_house("host", overlap=True, may_fail=True)
    while driver.num_copies_back <= num_before:
        driver.step()
    queued = [entry for entry, _ in driver.engine.stream.queue if isinstance(entry, PageCopy)]
    driver.engine.stream.fail_copies = [not pages.to_host for pages in queued]
    assert any(driver.engine.stream.fail_copies)
    driver.run()
    (rid,) = driver.failed
    ids = ids_of(int(rid[1]))[:10]
    driver.add(new_req("again", [*ids, *reference_tokens(ids, 25, eos=None)], 3))
    driver.run()


def test_an_abort_while_on_the_host_frees_the_host_pages() -> None:
    driver = full_house("host")
    while not driver.retraction.count.num_retracted:
        driver.step()
    victim = next(req for req in driver.live.values() if req.host_pages)
    assert victim.kv is None and victim.timeline.stage is ReqStage.RETRACTED
    driver.end(victim)
    assert driver.ledger.host.num_held == 0
    driver.run()


def test_a_request_that_can_never_fit_is_ended_alone() -> None:
    """Nodes refuse such requests; should one come through, the others go on."""
    driver = new_driver("auto", overlap=True, may_fail=True)
    driver.add(new_req("large", list(range(40)), 60))
    driver.add(new_req("small", [1, 2, 3], 40))
    driver.run()
    assert driver.unservable == ["large"]
    assert len(driver.outputs("large")) > 20


def test_polls_of_an_idle_loop_age_no_retracted_request() -> None:
    """How often a loop looks for work while none can run depends on the machine; a decision must not."""
    driver = new_driver("recompute", retracted_wait_steps=3, overlap=False)
    arrival, retracted = new_req("arrival", [1, 2, 3], 5), new_req("retracted", [4, 5, 6], 5)
    driver.add(retracted)
    driver.step()
    driver.step()
    driver.batcher._retract(retracted)
    for _ in range(10):
        driver.retraction.begin_turn(driver.batcher.num_steps)
    assert driver.batcher.is_open_to(arrival, None)
    driver.retraction.begin_turn(driver.batcher.num_steps + 3)
    assert not driver.batcher.is_open_to(arrival, None)


@pytest.mark.parametrize("policy", ["host", "recompute"])
@pytest.mark.parametrize("wait_steps", [0, 5, 30])
def test_arrivals_pass_a_retracted_request_for_so_many_steps_and_no_longer(
    policy: str, wait_steps: int
) -> None:
    """Short requests keep coming; each would fit into what is left over by those who run."""
    driver = new_driver(policy, retracted_wait_steps=wait_steps, max_running_requests=16, overlap=False)
    for i in range(3):
        driver.add(new_req(f"long{i}", ids_of(i)[:10], 44))
    passed: list[int] = []
    longest = 0
    for turn in range(400):
        if turn % 2 == 0 and len(driver.batcher.waiting_queue) < 3:
            driver.add(new_req(f"short{turn}", [turn % 900], 2))
        before = {r.key.rid for r in driver.batcher.waiting_queue}
        queue, decided_at = list(driver.retraction._queue), driver.batcher.num_steps
        driver.step()
        admitted = before - {r.key.rid for r in driver.batcher.waiting_queue}
        still = [req for req in queue if req in driver.retraction._queue]
        if still and admitted:
            passed.append(decided_at - min(req.stalled_since for req in still))
        longest = max([longest, *(decided_at - r.stalled_since for r in queue)])
        if not any(rid.startswith("long") for rid in driver.live):
            break
    else:
        raise AssertionError("a retracted request starves")
    assert all(waited < wait_steps for waited in passed)
    assert bool(passed) == (wait_steps > 0)
    # Once due, it waits for those who run to end: they need no more than their remaining tokens.
    assert longest <= wait_steps + 3 * 44
    driver.run()


def test_no_prefill_passes_an_older_request_whose_kv_is_on_the_host() -> None:
    s = Stepping(host_tokens=64)
    older, younger = new_req("older", range(10, 30), 20), new_req("younger", range(40, 60), 20)
    s.add(older, younger)
    while s.batcher.running_batch != [older, younger]:
        s.step()
    for req, mode in ((older, RetractMode.HOST), (younger, RetractMode.RECOMPUTE)):
        s.batcher.running_batch.remove(req)
        s.retraction.retract(req, mode)
    assert s.retraction.to_prefill() == []
    s.run()


@pytest.mark.parametrize("policy", ["auto", "host"])
@pytest.mark.parametrize("host_tokens", [0, 64])
def test_a_prompt_of_one_token_has_nothing_to_copy(policy: str, host_tokens: int) -> None:
    driver = new_driver(policy, overlap=True, host_tokens=host_tokens)
    req = new_req("one", [7], 5)
    driver.add(req)
    driver.step()  # its first forward is in flight
    assert req.kv is not None and not req.output_len
    assert driver.retraction._victims.mode_of(req) is RetractMode.RECOMPUTE
    driver.run()
