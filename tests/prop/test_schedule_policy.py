"""Each policy against a definition that shares no code with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shared.config import CacheOptions, ScheduleOptions
from shared.engine.build import make_ledger
from shared.kvcache.ledger import KVLedger
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import (
    LPM_MAX_WAITING,
    POLICIES,
    CachedPrefixes,
    InBatchPrefix,
    PriorityRule,
    SchedulePolicy,
)
from shared.timeline import Timeline
from tests.unit.scheduling.conftest import cache_prefix


class PolicyRig:
    """Some cached prefixes, some waiting requests that share them and each other, some running ones."""

    def __init__(self, seed: int, num_waiting: int | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.page_size = rng.choice([1, 2, 4])
        self.ledger = make_ledger(3000, CacheOptions(page_size=self.page_size), 64, 1024)
        self.cached = [self.tokens() for _ in range(rng.randrange(8))]
        for extra_key, ids in self.cached:
            cache_prefix(self.ledger, ids, extra_key)
        count = rng.randrange(12) if num_waiting is None else num_waiting
        self.waiting = [self.req(f"w{i}") for i in range(count)]
        self.running = [self.req(f"r{i}") for i in range(rng.randrange(6))]
        self.prefilling = [self.req(f"p{i}") for i in range(rng.randrange(3))]

    def tokens(self) -> tuple[str, list[int]]:
        """Of a small alphabet, so that many share a beginning."""
        rng = self.rng
        return rng.choice(["", "", "tenant"]), [rng.randrange(2) for _ in range(rng.randint(1, 14))]

    def req(self, rid: str) -> Req:
        rng = self.rng
        extra_key, ids = self.tokens()
        output_len = rng.randrange(3)
        judged_from = rng.choice([None, None, -1, rng.randrange(len(ids))])
        return Req(
            key=ReqKey("router", rid),
            work=Work(
                tuple(ids),
                output_ids=tuple(rng.randrange(2) for _ in range(output_len)),
                params=SamplingParams(
                    max_new_tokens=rng.randint(3, 9),
                    temperature=0.0,
                    logprobs=None if judged_from is None else LogprobParams(start_len=judged_from),
                ),
                extra_key=extra_key,
                priority=rng.randint(-3, 3),
                routing_key=rng.choice(["", "a", "b", "c"]),
            ),
            timeline=Timeline(Role.DECODE),
            max_output_len=9,
            arrival_step=rng.randrange(100),
            num_retractions=rng.random() < 0.2,
        )

    def cached_len(self, req: Req) -> int:
        """The longest whole-page prefix of what may be cached that some computed sequence begins with."""
        return max(
            (
                shared_len(cacheable(req), ids, self.page_size)
                for key, ids in self.cached
                if key == req.extra_key
            ),
            default=0,
        )

    def order(self, policy: str, step: int = 100, **options: object) -> list[Req]:
        schedule = ScheduleOptions(schedule_policy=policy, **options)  # type: ignore[arg-type]
        return make_policy(schedule, self.ledger).order(self.waiting, self.running, self.prefilling, step)


def make_policy(options: ScheduleOptions, ledger: KVLedger) -> SchedulePolicy:
    return SchedulePolicy(options, ledger, PriorityRule(options), CachedPrefixes(ledger))


def cacheable(req: Req) -> list[int]:
    """All but the last token; of a prompt that is judged, what comes before that."""
    wanted = req.params.logprobs
    if wanted is not None and wanted.start_len >= 0 and len(req.ids) == req.num_input_ids:
        return req.ids[: wanted.start_len]
    return req.ids[:-1]


def shared_len(a: Sequence[int], b: Sequence[int], page_size: int) -> int:
    """Tokens of the whole pages with which both begin."""
    n = 0
    while n + page_size <= min(len(a), len(b)) and a[n : n + page_size] == b[n : n + page_size]:
        n += page_size
    return n


def dfs(world: PolicyRig, prefix: tuple[int, ...], extra_key: str, reqs: list[Req]) -> list[Req]:
    """`reqs` match at least `prefix`: first those who match more, by the next page, the most wanted first."""
    more: dict[tuple[int, ...], list[Req]] = {}
    for req in reqs:
        if world.cached_len(req) > len(prefix):
            more.setdefault(tuple(req.ids[: len(prefix) + world.page_size]), []).append(req)
    groups = sorted(more.items(), key=lambda group: (-len(group[1]), reqs.index(group[1][0])))
    below = [req for longer, group in groups for req in dfs(world, longer, extra_key, group)]
    return below + [req for req in reqs if world.cached_len(req) == len(prefix)]


def by_dfs_weight(world: PolicyRig, reqs: list[Req]) -> list[Req]:
    """At the root, the extra_key is part of the first page."""
    tops: dict[tuple[str, tuple[int, ...]], list[Req]] = {}
    for req in reqs:
        if world.cached_len(req):
            tops.setdefault((req.extra_key, tuple(req.ids[: world.page_size])), []).append(req)
    groups = sorted(tops.items(), key=lambda group: (-len(group[1]), reqs.index(group[1][0])))
    below = [r for (key, page), group in groups for r in dfs(world, page, key, group)]
    return below + [req for req in reqs if not world.cached_len(req)]


def by_routing_key(world: PolicyRig, reqs: list[Req]) -> list[Req]:
    running = [*world.running, *world.prefilling]
    keys = {req.work.routing_key for req in running} - {""}
    often = {key: sum(req.work.routing_key == key for req in running) for key in keys}
    ranked = sorted(sorted(keys), key=lambda key: often[key], reverse=True)
    matched = [req for key in ranked for req in reqs if req.work.routing_key == key]
    others = [req for req in reqs if req not in matched]
    return matched + [req for key in ("", "a", "b", "c") for req in others if req.work.routing_key == key]


def by_cached_len(world: PolicyRig, reqs: list[Req]) -> list[Req]:
    lengths = sorted({world.cached_len(req) for req in reqs}, reverse=True)
    return [req for length in lengths for req in reqs if world.cached_len(req) == length]


def by_output(world: PolicyRig, reqs: list[Req]) -> list[Req]:
    def left(req: Req) -> int:
        return req.params.max_new_tokens - (len(req.ids) - req.num_input_ids)

    return [req for n in range(9, -1, -1) for req in reqs if left(req) == n]


DEFINITIONS: dict[str, Callable[[PolicyRig, list[Req]], list[Req]]] = {
    "fcfs": lambda world, reqs: list(reqs),
    "lpm": by_cached_len,
    "dfs-weight": by_dfs_weight,
    "lof": by_output,
    "routing-key": by_routing_key,
}


@pytest.mark.parametrize("policy", DEFINITIONS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_a_policy_is_its_definition(policy: str, seed: int) -> None:
    world = PolicyRig(seed)
    for req in world.waiting:
        req.num_retractions, req.arrival_step = 0, 100
    assert world.order(policy) == DEFINITIONS[policy](world, world.waiting)


def test_every_policy_has_a_definition_here() -> None:
    assert set(POLICIES) == {*DEFINITIONS, "random"}


@pytest.mark.parametrize("policy", DEFINITIONS)
@given(seed=st.integers(0, 2**32), enabled=st.booleans(), low_first=st.booleans())
@settings(max_examples=80)
def test_class_then_retracted_then_the_policy(policy: str, seed: int, enabled: bool, low_first: bool) -> None:
    world = PolicyRig(seed)
    sign = -1 if low_first else 1

    def level(req: Req) -> int:
        assert req.arrival_step is not None
        return (sign * req.work.priority if enabled else 0) + (100 - req.arrival_step) // 30

    by_policy = DEFINITIONS[policy](world, world.waiting)
    expected: list[Req] = []
    for wanted in range(9, -9, -1):
        alike = [req for req in world.waiting if level(req) == wanted]
        expected += [req for req in alike if req.num_retractions]
        expected += [req for req in by_policy if req in alike and not req.num_retractions]
    order = world.order(
        policy,
        enable_priority_scheduling=enabled,
        schedule_low_priority_values_first=low_first,
        priority_aging_steps=30,
    )
    assert order == expected


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_a_peek_sees_what_a_match_finds_and_changes_nothing(seed: int) -> None:
    world = PolicyRig(seed, num_waiting=6)
    cache = world.ledger.radix_cache

    def state() -> list[tuple[int, int, int, int]]:
        return [(id(n), n.last_access, n.lock_ref, len(n.pages)) for n in cache._nodes()]

    before = state()
    peeks = [world.ledger.peek_prefix(req.matchable_ids, req.extra_key) for req in world.waiting]
    assert state() == before
    for req, peek in zip(world.waiting, peeks, strict=True):
        assert peek.num_pages * world.page_size == world.cached_len(req)
        match = world.ledger.match_prefix(req.matchable_ids, req.extra_key)
        assert len(match.pages) == peek.num_pages


@given(seed=st.integers(0, 2**32), worth=st.integers(1, 8), aging_steps=st.sampled_from([0, 30]))
@settings(max_examples=400)
def test_who_waits_for_a_prefix(seed: int, worth: int, aging_steps: int) -> None:
    """Exactly those who share enough that is not cached with somebody being computed who has aged no less."""
    world = PolicyRig(seed, num_waiting=10)
    options = ScheduleOptions(
        in_batch_prefix_caching_deprioritize_threshold=worth, priority_aging_steps=aging_steps
    )
    prefixes = InBatchPrefix(world.ledger, options, PriorityRule(options), CachedPrefixes(world.ledger))

    def age(req: Req) -> int:
        assert req.arrival_step is not None
        return (100 - req.arrival_step) // aging_steps if aging_steps else 0

    for req in world.waiting:
        shared = max(
            (
                shared_len(cacheable(req), other.ids, world.page_size)
                for other in world.prefilling
                if other.extra_key == req.extra_key and age(other) >= age(req)
            ),
            default=0,
        )
        expected = 0 if req.num_retractions or shared - world.cached_len(req) < worth else shared
        assert prefixes.shared_tokens(req, world.prefilling, 100) == expected


class TestRandom:
    def orders(self, seed: int, num_rounds: int = 40) -> list[list[Req]]:
        world = PolicyRig(5, num_waiting=5)
        for req in world.waiting:
            req.num_retractions, req.arrival_step = 0, 100
        options = ScheduleOptions(schedule_policy="random", random_seed=seed)
        policy = make_policy(options, world.ledger)
        orders = [policy.order(world.waiting, (), (), 100) for _ in range(num_rounds)]
        return [[world.waiting.index(req) for req in order] for order in orders]  # type: ignore[misc]

    def test_the_seed_decides(self) -> None:
        assert self.orders(1) == self.orders(1)
        assert self.orders(1) != self.orders(2)

    def test_everybody_is_served_and_everybody_is_first_some_day(self) -> None:
        orders = self.orders(3)
        assert all(sorted(order) == list(range(5)) for order in orders)  # type: ignore[type-var]
        assert {order[0] for order in orders} == set(range(5))


class TestAdjustment:
    def logged(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [r.getMessage() for r in caplog.records if "schedule_policy_adjusted" in r.getMessage()]

    def test_lpm_acts_as_fcfs_while_too_many_wait(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level("INFO", logger="baton")
        world = PolicyRig(11, num_waiting=LPM_MAX_WAITING + 1)
        for req in world.waiting:
            req.num_retractions, req.arrival_step = 0, 0
        options = ScheduleOptions(schedule_policy="lpm")
        policy = make_policy(options, world.ledger)
        for _ in range(3):
            assert policy.order(world.waiting, (), (), 0) == world.waiting
        assert policy.acts_as(LPM_MAX_WAITING + 1) == "fcfs"
        assert policy.order(world.waiting[1:], (), (), 0) == by_cached_len(world, world.waiting[1:])
        assert policy.acts_as(LPM_MAX_WAITING) == "lpm"
        policy.order(world.waiting, (), (), 0)
        assert len(self.logged(caplog)) == 1
        assert "policy=lpm acts_as=fcfs" in self.logged(caplog)[0]

    @pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
    def test_without_a_cache_there_is_nothing_to_match(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", logger="baton")
        ledger = make_ledger(30, CacheOptions(page_size=4, disable_radix_cache=True), 4, 64)
        options = ScheduleOptions(schedule_policy=name)
        policy = make_policy(options, ledger)
        assert policy.acts_as(0) == "fcfs"
        assert self.logged(caplog) == [
            f'schedule_policy_adjusted policy={name} acts_as=fcfs reason="the RadixCache is off"'
        ]

    @pytest.mark.parametrize("name", ["fcfs", "lof", "random", "routing-key"])
    def test_the_others_need_no_cache(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        ledger = make_ledger(30, CacheOptions(page_size=4, disable_radix_cache=True), 4, 64)
        options = ScheduleOptions(schedule_policy=name)
        assert make_policy(options, ledger).acts_as(10_000) == name
        assert not self.logged(caplog)
