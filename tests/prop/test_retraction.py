"""Retraction over the real ledger, launcher and host pages, each way: outputs right, every page home, in order."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.engine.launcher import Launcher
from shared.kvcache.audit import audit, audit_idle
from shared.kvcache.host_pages import PageCopy
from shared.protocol.messages import Finish, ReqKey, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import ReqStage, Role, Timeline
from tests.plan_records import PlanRecord, plan_of, record_of
from tests.token_engine import reference_tokens, token_engine

POOL_TOKENS = 64
PLANS = msgspec.msgpack.Decoder(PlanRecord)


def make_config(
    policy: str,
    *,
    page_size: int = 4,
    tokens: int = POOL_TOKENS,
    host_tokens: int = 256,
    retract_every: int = 0,
    reserved: int = 0,
    wait_steps: int = 16,
    rows: int = 8,
    disable_radix_cache: bool = False,
) -> NodeConfig:
    return NodeConfig(
        cache=CacheOptions(
            page_size=page_size,
            max_total_tokens=tokens,
            host_kv_tokens=host_tokens,
            disable_radix_cache=disable_radix_cache,
        ),
        schedule=ScheduleOptions(
            chunked_prefill_size=16,
            max_running_requests=rows,
            schedule_conservativeness=0.0,
            num_reserved_decode_tokens=reserved,
            retract_policy=policy,
            retract_every=retract_every,
            retracted_wait_steps=wait_steps,
        ),
        model=ModelOptions(context_length=256),
    )


def make_req(
    rid: str, ids: list[int], max_new_tokens: int, *, ignore_eos: bool = False, priority: int = 0
) -> Req:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos)
    work = Work(tuple(ids), params, priority=priority)
    return Req(ReqKey("router", rid), work, Timeline(Role.DECODE), max_new_tokens)


class Driver:
    """What the decode node's loop does with a Batcher, and nothing else.

    Each plan crosses as bytes: nothing but its ints and keys reaches the Launcher.
    """

    def __init__(self, config: NodeConfig, *, overlap: bool) -> None:
        self.engine = token_engine(config)
        self.batcher = Batcher(self.engine.ledger, config.schedule)
        self.retraction = self.batcher.retraction
        self.launcher = Launcher(
            self.engine.stream,
            self.engine.ledger,
            self.engine.eos_token_ids,
            overlap=overlap,
            span=self.engine.profiler.span,
            debug_checks=True,
        )
        self.live: dict[str, Req] = {}
        self.done: dict[str, Req] = {}
        self.failed: list[str] = []
        self.unservable: list[str] = []
        self.num_copies_back = 0

    def add(self, req: Req) -> None:
        self.live[req.key.rid] = req
        self.batcher.add(req)

    def end(self, req: Req) -> None:
        self.batcher.remove(req)
        if req.finish is None:
            req.end(Finish("abort"))
        if req.kv is not None:
            self.engine.ledger.cache_finished_req(req.kv, req.ids)
            req.kv = None
        assert not req.host_pages
        self.done[req.key.rid] = self.live.pop(req.key.rid)

    def step(self) -> bool:
        record = record_of(self.batcher.plan())
        sent = msgspec.msgpack.encode(record)
        plan = plan_of(PLANS.decode(sent), {req.key: req for req in self.live.values()})
        assert record_of(plan) == record
        self.num_copies_back += sum(not copy.pages.to_host for copy in plan.copies)
        outcome = self.launcher.turn(plan)
        self.batcher.observe(outcome)
        for req in outcome.finished:
            self.end(req)
        for req in outcome.failed:
            self.failed.append(req.key.rid)
            self.end(req)
        for key in plan.unservable:
            self.unservable.append(key.rid)
            self.end(self.live[key.rid])
        audit(self.engine.ledger)
        self.check_host()
        return outcome.worked or bool(plan.copies)

    def check_host(self) -> None:
        """Host pages belong to live requests alone, each to one."""
        held = [page for req in self.live.values() for page in req.host_pages]
        assert len(held) == len(set(held)) == self.engine.ledger.host.num_held

    def drain(self, max_steps: int = 4000) -> None:
        for _ in range(max_steps):
            if not self.step() and not self.live:
                audit_idle(self.engine.ledger)
                return
        raise AssertionError(f"{sorted(self.live)} starve: {self.retraction.count}")

    def outputs(self, rid: str) -> list[int]:
        req = self.done[rid]
        return req.ids[req.num_input_ids :]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_every_output_is_right_and_every_page_comes_home(seed: int) -> None:
    rng = random.Random(seed)
    config = make_config(
        rng.choice(["auto", "host", "recompute"]),
        page_size=rng.choice([1, 2, 4, 16]),
        tokens=rng.choice([64, 96, 160]),
        host_tokens=rng.choice([16, 40, 256]),
        retract_every=rng.choice([0, 0, 2, 3, 7]),
        reserved=rng.choice([0, 4, 32]),
        wait_steps=rng.choice([0, 1, 16]),
        rows=rng.choice([2, 5, 12]),
        disable_radix_cache=rng.random() < 0.2,
    )
    driver = Driver(config, overlap=rng.random() < 0.6)
    driver.retraction.costs.prefill.observe(rng.choice([1, 1e9]), 10)  # for `auto`: either may be cheaper
    shared = [rng.randrange(997) for _ in range(20)]
    wanted = {}
    for i in range(14):
        ids = shared[: rng.randrange(20)] + [rng.randrange(997) for _ in range(rng.randint(1, 20))]
        wanted[f"r{i:02d}"] = (ids, rng.randint(1, min(40, 64 - len(ids))))
    pending, aborted, steps = list(wanted), set(), 0
    while pending or driver.live:
        if pending and rng.random() < 0.5:
            rid = pending.pop()
            driver.add(make_req(rid, *wanted[rid]))
        if driver.live and rng.random() < 0.02:
            victim = driver.live[rng.choice(sorted(driver.live))]
            aborted.add(victim.key.rid)
            driver.end(victim)
        driver.step()
        steps += 1
        assert steps < 4000, f"somebody starves: {driver.retraction.count}, {sorted(driver.live)}"
    driver.drain()
    assert not driver.failed and not driver.unservable
    for rid, (ids, max_new_tokens) in wanted.items():
        expected = reference_tokens(ids, max_new_tokens)
        outputs = driver.outputs(rid)
        assert outputs == (expected[: len(outputs)] if rid in aborted else expected), rid


class RetractionMachine(RuleBasedStateMachine):
    """Arrivals, aborts, failing copies and forced retractions in any order, at any step."""

    @initialize(
        policy=st.sampled_from(["auto", "host", "recompute"]),
        page_size=st.sampled_from([1, 4]),
        host_tokens=st.sampled_from([8, 32, 256]),
        overlap=st.booleans(),
        reserved=st.sampled_from([0, 8]),
    )
    def start(self, policy: str, page_size: int, host_tokens: int, overlap: bool, reserved: int) -> None:
        config = make_config(policy, page_size=page_size, host_tokens=host_tokens, reserved=reserved)
        self.driver = Driver(config, overlap=overlap)
        self.wanted: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.num_failures = 0

    @rule(seed=st.integers(0, 2**16), length=st.integers(1, 20), max_new_tokens=st.integers(1, 40))
    def arrive(self, seed: int, length: int, max_new_tokens: int) -> None:
        if len(self.driver.live) >= 10:
            return
        rng = random.Random(seed)
        ids = [rng.randrange(20) for _ in range(length)]
        rid = f"r{len(self.wanted):03d}"
        self.wanted[rid] = reference_tokens(ids, max_new_tokens)
        self.driver.add(make_req(rid, ids, max_new_tokens))

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.driver.batcher.running_batch)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """As preemption does, at a moment of its own choice."""
        self.driver.batcher._retract(data.draw(st.sampled_from(self.driver.batcher.running_batch)))
        self.driver.step()

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.driver.live)))
        self.aborted.add(rid)
        self.driver.end(self.driver.live[rid])

    @rule()
    def fail_a_copy(self) -> None:
        self.driver.engine.stream.fail_copies.append(True)
        self.num_failures += 1

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.drain()
        assert not self.driver.unservable
        assert len(self.driver.failed) <= self.num_failures
        for rid, expected in self.wanted.items():
            outputs = self.driver.outputs(rid)
            cut = rid in self.aborted or rid in self.driver.failed
            assert outputs == (expected[: len(outputs)] if cut else expected), rid


TestRetractionMachine = RetractionMachine.TestCase
TestRetractionMachine.settings = settings(max_examples=60, stateful_step_count=40)


def full_house(policy: str, *, overlap: bool = False, host_tokens: int = 256, num: int = 4) -> Driver:
    """Requests that fit into the pool when they start and outgrow it together."""
    driver = Driver(make_config(policy, host_tokens=host_tokens), overlap=overlap)
    for i in range(num):
        driver.add(make_req(f"r{i}", [100 + 13 * i + j for j in range(10)], 30, ignore_eos=True))
    return driver


def check_full_house(driver: Driver, num: int = 4) -> None:
    for i in range(num):
        ids = [100 + 13 * i + j for j in range(10)]
        assert driver.outputs(f"r{i}") == reference_tokens(ids, 30, eos=None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("policy", "used", "unused"),
    [("host", "num_host", "num_recompute"), ("recompute", "num_recompute", "num_host")],
)
def test_a_policy_takes_its_own_way(policy: str, used: str, unused: str, overlap: bool) -> None:
    driver = full_house(policy, overlap=overlap)
    driver.drain()
    check_full_house(driver)
    count = driver.retraction.count
    assert getattr(count, used) > 0 and getattr(count, unused) == 0
    assert (driver.engine.stream.num_copies > 0) == (policy == "host")


@pytest.mark.parametrize(("tokens_per_s", "used"), [(1e-3, "num_host"), (1e12, "num_recompute")])
def test_auto_takes_the_cheaper_way(tokens_per_s: float, used: str) -> None:
    driver = full_house("auto")
    for _ in range(200):
        driver.retraction.costs.prefill.observe(tokens_per_s, 1)
    driver.drain()
    check_full_house(driver)
    count = driver.retraction.count
    assert getattr(count, used) == count.num_host + count.num_recompute > 0


def test_auto_recomputes_when_the_host_pool_is_full() -> None:
    driver = full_house("auto", host_tokens=4)
    for _ in range(200):
        driver.retraction.costs.prefill.observe(1e-3, 1)
    driver.drain()
    check_full_house(driver)
    assert driver.retraction.count.num_host == 0 < driver.retraction.count.num_recompute


@pytest.mark.parametrize("overlap", [False, True])
def test_host_waits_in_place_when_the_host_pool_is_full(overlap: bool) -> None:
    """As long as anybody can go on, who finds no room on the host keeps its KV and sits steps out."""
    driver = Driver(make_config("host", host_tokens=4), overlap=overlap)
    prompts = {
        f"r{i}": [100 + 13 * i + j for j in range(8 + i)] for i in range(4)
    }  # one needs a page each step
    for rid, ids in prompts.items():
        driver.add(make_req(rid, ids, 30, ignore_eos=True))
    while not driver.retraction.count.num_waits:
        assert driver.step()
    waiting = driver.retraction._sitting_out
    assert waiting and all(req in driver.batcher.running_batch and req.kv is not None for req in waiting)
    assert driver.retraction.count.num_recompute == 0
    driver.drain()
    assert driver.retraction.count.num_host == 0
    for rid, ids in prompts.items():
        assert driver.outputs(rid) == reference_tokens(ids, 30, eos=None)


def test_nobody_gives_anything_up_for_pages_that_come_home_with_the_forward_in_flight() -> None:
    """Four pages of four; `a` ends just when `b` needs its third: under overlap its pages are a step late."""
    driver = Driver(make_config("recompute", tokens=16), overlap=True)
    driver.add(make_req("a", [1, 2, 3, 4, 5], 4, ignore_eos=True))
    driver.add(make_req("b", [6, 7, 8, 9, 10], 10, ignore_eos=True))
    driver.drain()
    assert driver.outputs("b") == reference_tokens([6, 7, 8, 9, 10], 10, eos=None)
    count = driver.retraction.count
    assert (count.num_host, count.num_recompute, count.num_waits) == (0, 0, 1)


def test_victims_are_those_who_lose_least() -> None:
    driver = Driver(make_config("recompute", tokens=256), overlap=False)
    for rid, num_input, num_output in [("d", 5, 2), ("b", 9, 2), ("a", 9, 2), ("c", 20, 3)]:
        req = make_req(rid, [1] * (num_input + num_output), 30)
        req.num_input_ids = num_input
        driver.batcher.running_batch.append(req)
    order = driver.retraction._victims.in_order(driver.batcher.running_batch, 0)
    assert [req.key.rid for req in order] == ["a", "b", "d", "c"]


def test_lower_priority_is_retracted_first_where_it_counts() -> None:
    config = make_config("recompute", tokens=256)
    for enabled, expected in [(False, "few"), (True, "low")]:
        schedule = ScheduleOptions(enable_priority_scheduling=enabled)
        driver = Driver(NodeConfig(cache=config.cache, schedule=schedule, model=config.model), overlap=False)
        few, low = make_req("few", [1, 2], 9, priority=5), make_req("low", [1, 2, 3], 9)
        few.arrival_step = low.arrival_step = 0
        low.num_input_ids = 2
        assert driver.retraction._victims.in_order([few, low], 0)[0].key.rid == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["auto", "host", "recompute"])
def test_the_last_running_request_waits_for_pages_and_keeps_its_own(policy: str, overlap: bool) -> None:
    """What holds the others may be a transfer: giving its own pages up would help the request to nothing."""
    driver = Driver(make_config(policy), overlap=overlap)
    driver.add(make_req("last", list(range(10)), 40, ignore_eos=True))
    while driver.live["last"].output_len < 5:
        driver.step()
    ledger = driver.engine.ledger
    kv = ledger.admit(ledger.match_prefix([500], ""), "")
    assert kv is not None and ledger.grow(kv, 4 * ledger.num_available_pages)
    while driver.step():
        assert driver.live
    assert driver.retraction.count.num_waits > 0
    ledger.cache_finished_req(kv, ())
    driver.drain()
    assert driver.batcher.num_retractions == 0
    assert driver.outputs("last") == reference_tokens(range(10), 40, eos=None)


@pytest.mark.parametrize("policy", ["auto", "host", "recompute"])
def test_pages_that_come_home_with_the_forward_in_flight_are_waited_for(policy: str) -> None:
    """Two requests of 20 tokens fill the pool, and need the pages of a third while its last token is in flight."""
    driver = Driver(make_config(policy, tokens=40), overlap=True)
    for i, (num_ids, num_new) in enumerate([(5, 5), (8, 12), (8, 12)]):
        driver.add(make_req(f"r{i}", [200 * i + j for j in range(num_ids)], num_new, ignore_eos=True))
    driver.drain()
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
    check_full_house(driver)


def test_a_copy_that_fails_fails_its_request_alone() -> None:
    driver = full_house("host", overlap=True)
    driver.engine.stream.fail_copies = [False, True]
    driver.drain()
    assert len(driver.failed) == 1
    for rid in {"r0", "r1", "r2", "r3"} - set(driver.failed):
        ids = [100 + 13 * int(rid[1]) + j for j in range(10)]
        assert driver.outputs(rid) == reference_tokens(ids, 30, eos=None)


def test_what_a_failed_copy_left_behind_is_not_shared() -> None:
    """A page that the copy back never reached must not come out of the RadixCache later."""
    driver = full_house("host", overlap=True)
    while driver.engine.stream.num_copies < 1:
        driver.step()
    driver.engine.stream.fail_copies = [True] * 100
    driver.drain()
    driver.engine.stream.fail_copies = []
    assert driver.failed
    for rid in sorted(driver.failed):
        ids = [100 + 13 * int(rid[1]) + j for j in range(10)]
        again = [*ids, *reference_tokens(ids, 25, eos=None)]
        driver.add(make_req(f"again-{rid}", again, 3, ignore_eos=True))
        driver.drain()
        assert driver.outputs(f"again-{rid}") == reference_tokens(again, 3, eos=None)


@pytest.mark.parametrize("num_before", range(4))
def test_what_is_computed_over_a_copy_back_that_failed_is_dropped(num_before: int) -> None:
    """The step behind the copy reads pages that the copy never wrote: its token is wrong, and so is its KV."""
    driver = full_house("host", overlap=True)
    while driver.num_copies_back <= num_before:
        driver.step()
    queued = [entry for entry, _ in driver.engine.stream.queue if isinstance(entry, PageCopy)]
    driver.engine.stream.fail_copies = [not pages.to_host for pages in queued]
    assert any(driver.engine.stream.fail_copies)
    driver.drain()
    (rid,) = driver.failed
    ids = [100 + 13 * int(rid[1]) + j for j in range(10)]
    known, expected = driver.outputs(rid), reference_tokens(ids, 30, eos=None)
    assert known == expected[: len(known)]
    driver.add(make_req("again", [*ids, *expected[:25]], 3, ignore_eos=True))
    driver.drain()
    assert driver.outputs("again") == reference_tokens([*ids, *expected[:25]], 3, eos=None)


def test_an_abort_while_on_the_host_frees_the_host_pages() -> None:
    driver = full_house("host")
    while not driver.retraction.count.num_retracted:
        driver.step()
    victim = next(req for req in driver.live.values() if req.host_pages)
    assert victim.kv is None and victim.timeline.stage is ReqStage.RETRACTED
    driver.end(victim)
    assert driver.engine.ledger.host.num_held == 0
    driver.drain()


def test_a_request_that_can_never_fit_is_ended_alone() -> None:
    """Nodes refuse such requests; should one come through, the others go on."""
    driver = Driver(make_config("auto"), overlap=True)
    driver.add(make_req("large", list(range(40)), 60, ignore_eos=True))
    driver.add(make_req("small", [1, 2, 3], 40, ignore_eos=True))
    driver.drain()
    assert driver.unservable == ["large"]
    assert (
        driver.outputs("large") == reference_tokens(range(40), 60, eos=None)[: len(driver.outputs("large"))]
    )
    assert len(driver.outputs("large")) > 20
    assert driver.outputs("small") == reference_tokens([1, 2, 3], 40, eos=None)


def test_polls_of_an_idle_loop_age_no_retracted_request() -> None:
    """How often a loop looks for work while none can run depends on the machine; a decision must not."""
    driver = Driver(make_config("recompute", wait_steps=3), overlap=False)
    arrival, retracted = (
        make_req("arrival", [1, 2, 3], 5),
        make_req("retracted", [4, 5, 6], 5, ignore_eos=True),
    )
    driver.add(retracted)
    driver.step()
    driver.step()
    driver.batcher._retract(retracted)
    for _ in range(10):
        driver.retraction.begin_turn(driver.batcher.num_steps)
    assert driver.retraction.admissible([arrival]) == [arrival]
    driver.retraction.begin_turn(driver.batcher.num_steps + 3)
    assert driver.retraction.admissible([arrival]) == []


@pytest.mark.parametrize("policy", ["host", "recompute"])
@pytest.mark.parametrize("wait_steps", [0, 5, 30])
def test_arrivals_pass_a_retracted_request_for_so_many_steps_and_no_longer(
    policy: str, wait_steps: int
) -> None:
    """Short requests keep coming; each would fit into what is left over by those who run."""
    driver = Driver(make_config(policy, wait_steps=wait_steps, rows=16), overlap=False)
    for i in range(3):
        driver.add(make_req(f"long{i}", [100 + 13 * i + j for j in range(10)], 44, ignore_eos=True))
    passed: list[int] = []
    longest = 0
    for turn in range(400):
        if turn % 2 == 0 and len(driver.batcher.waiting_queue) < 3:
            driver.add(make_req(f"short{turn}", [turn % 900], 2, ignore_eos=True))
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
    driver.drain()
