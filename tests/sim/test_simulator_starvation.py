"""No request starves: bounds on how long one waits, for every policy, while more comes than can be served."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from enum import Enum

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape
from planner.simulator.node import NodeShape
from planner.traffic.trace import SimRequest
from shared.config import ScheduleOptions
from shared.protocol.messages import Role
from shared.scheduling.plan import ScheduleBatch
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import POLICIES
from tests.sim.faults import is_empty
from tests.sim.watched_fleet import WatchedFleet, WatchedNode
from tests.sim.workloads import chats

COSTS = CostModel(a=0.004, b=2e-4, c=1e-8, d=0.002, e=1e-5, f=1e-7)
CHUNK = 32
AGING_STEPS = 24
SLACK = 4
"""Forwards: one in flight, one that was planned before the arrival was heard, and a chunk that is not full."""


@dataclass
class Waited:
    """Forwards of the prefill node, counted from its start."""

    arrived: int
    begun: int
    ended: int
    num_tokens: int


class WaitLog:
    """When each request came to the prefill node, and when it was computed there. Give `on_launch` to a fleet."""

    def __init__(self) -> None:
        self.of: dict[str, Waited] = {}
        self._num_launched = 0

    def on_launch(self, node: WatchedNode, batch: ScheduleBatch) -> None:
        if node.role != "prefill":
            return
        self._num_launched += 1
        for item in batch.items:
            rid, step = item.req.key.rid, item.req.arrival_step
            assert step is not None
            waited = self.of.setdefault(rid, Waited(step, self._num_launched, 0, 0))
            waited.ended = self._num_launched
            waited.num_tokens += item.length


def flood(rng: random.Random) -> list[SimRequest]:
    """Three times what one prefill node can serve: favourites of every policy, and now and then somebody's last."""
    favourites = chats(rng, 260, gap_s=0.002, block_tokens=8, num_prompts=1, output_len=(14, 16))
    others = [
        SimRequest(0.05 + 0.1 * i, 24, 2, tuple(range(9000 + 3 * i, 9003 + 3 * i)), 8) for i in range(4)
    ]
    return sorted([*favourites, *others], key=lambda request: request.at_s)


def serve(policy: str, aging_steps: int, short_prompt_share: float = 0.5) -> tuple[WaitLog, WatchedFleet]:
    schedule = ScheduleOptions(
        schedule_policy=policy,
        chunked_prefill_size=CHUNK,
        max_running_requests=400,
        priority_aging_steps=aging_steps,
        short_prompt_share=short_prompt_share,
        in_batch_prefix_caching_deprioritize_threshold=8,
    )
    shape = NodeShape(pool_tokens=40_000, page_size=8, context_length=256, schedule=schedule)
    log = WaitLog()
    fleet = WatchedFleet(FleetShape(prefill=shape, decode=shape), COSTS, on_launch=log.on_launch)
    fleet.submit(flood(random.Random(1)))
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    return log, fleet


def worst_excess(log: WaitLog, aging_steps: int) -> float:
    """By how many forwards the worst wait exceeds what those take who may go before.

    Those are all who came less than `aging_steps` forwards later and were not done when it came.
    """
    worst = float("-inf")
    for own in log.of.values():
        before = sum(
            other.num_tokens
            for other in log.of.values()
            if other is not own and other.arrived < own.arrived + aging_steps and other.ended > own.arrived
        )
        worst = max(worst, own.begun - own.arrived - before / CHUNK)
    return worst


@pytest.mark.parametrize("policy", list(POLICIES))
def test_only_those_go_before_who_came_before_one_has_aged(policy: str) -> None:
    log, _ = serve(policy, AGING_STEPS)
    assert worst_excess(log, AGING_STEPS) <= SLACK


def test_first_come_first_served_needs_no_aging() -> None:
    log, _ = serve("fcfs", 0, short_prompt_share=0.0)
    assert worst_excess(log, 1) <= SLACK


@pytest.mark.parametrize("policy", ["lof"])
def test_without_aging_somebody_starves(policy: str) -> None:
    """So the bound above is one that can be broken."""
    log, _ = serve(policy, 0)
    assert worst_excess(log, AGING_STEPS) > 10 * SLACK


class Place(Enum):
    """Where a prompt that needs most of a node's pages waits, and what would take each page that comes free."""

    PREFILL = "prompts beside it on a prefill node"
    BEHIND_LOCAL = "a split one, beside local prompts of a decode node"
    BEHIND_SPLIT = "a local one, beside split prompts of a decode node"


LONG_AT_S, TRAFFIC_S, GAP_S = 0.5, 2.0, 0.02
POOL_TOKENS = 2048
"""Of the node where the long prompt waits."""


class AdmissionLog:
    """The order in which requests got their pages on the nodes of one role. Give `on_step` to a fleet."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._num_steps = 0
        self.admitted: dict[str, tuple[int, Req]] = {}
        """Each request, and the step after which it held pages."""

    def on_step(self, node: WatchedNode) -> None:
        if node.role is self._role:
            self._num_steps += 1
            for key, req in node.scheduler.reqs.items():
                if req.kv is not None:
                    self.admitted.setdefault(key.rid, (self._num_steps, req))

    def passed(self, rid: str) -> list[int]:
        """How many forwards after the request each of those came that got their pages before it."""
        admitted_at, own = self.admitted[rid]
        assert own.arrival_step is not None
        return [
            other.arrival_step - own.arrival_step
            for at, other in self.admitted.values()
            if at < admitted_at
            and other.arrival_number > own.arrival_number
            and other.arrival_step is not None
        ]


def passed(place: Place, long_priority: int = 0, **schedule: object) -> tuple[list[int], int]:
    """A prompt of 1,600 tokens among short ones: `AdmissionLog.passed`, and the requests retracted until it ended."""
    options = ScheduleOptions(max_running_requests=200, priority_aging_steps=AGING_STEPS, **schedule)  # type: ignore[arg-type]
    small = NodeShape(pool_tokens=POOL_TOKENS, page_size=16, context_length=POOL_TOKENS, schedule=options)
    large = dataclasses.replace(small, pool_tokens=8 * POOL_TOKENS)
    short_len, prefill, decode = 16, large, small
    if place is Place.PREFILL:
        short_len, prefill, decode = 320, small, large
    shape = FleetShape(
        num_prefill=int(place is not Place.BEHIND_SPLIT),
        prefill=prefill,
        decode=decode,
        local_prefill_tokens=16 if place is Place.BEHIND_LOCAL else 0,
    )
    log = AdmissionLog(Role.PREFILL if place is Place.PREFILL else Role.DECODE)
    num_retractions = 0

    def on_step(node: WatchedNode) -> None:
        nonlocal num_retractions
        log.on_step(node)
        if not any(one.ended_at for one in fleet.outcomes.values() if one.request is long):
            num_retractions = fleet.nodes["d0000"].scheduler.batcher.num_retractions

    fleet = WatchedFleet(shape, COSTS, on_step=on_step, audits=True)
    if place is Place.BEHIND_SPLIT:  # without a prefill node the long prompt is the decode node's alone
        fleet.loop.at(LONG_AT_S + GAP_S / 4, fleet.start, "p0000", Role.PREFILL)
    long = SimRequest(LONG_AT_S, 1600, 8, tuple(range(10**6, 10**6 + 100)), 16, priority=long_priority)
    blocks = -(-short_len // 16)
    shorts = [
        SimRequest(GAP_S * i, short_len, 60, tuple(range(i * blocks, (i + 1) * blocks)), 16)
        for i in range(int(TRAFFIC_S / GAP_S))
    ]
    fleet.submit(sorted([*shorts, long], key=lambda request: request.at_s))
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    (rid,) = (rid for rid, outcome in fleet.outcomes.items() if outcome.request is long)
    return log.passed(rid), num_retractions


@pytest.mark.parametrize(
    ("place", "policy", "prioritized"),
    [
        *((Place.PREFILL, policy, False) for policy in POLICIES),
        *((place, "fcfs", False) for place in (Place.BEHIND_LOCAL, Place.BEHIND_SPLIT)),
        *((place, "fcfs", True) for place in Place),
    ],
)
def test_a_long_prompt_closes_admission_to_those_that_came_later(
    place: Place, policy: str, prioritized: bool
) -> None:
    """And no running request is retracted for it. On one queue the policy decides until the request has aged."""
    later, num_retractions = passed(place, schedule_policy=policy, enable_priority_scheduling=prioritized)
    assert num_retractions == 0
    if place is Place.PREFILL and policy in ("lof", "random"):
        assert max(later) < AGING_STEPS
    else:
        assert not later


@pytest.mark.parametrize("place", Place)
def test_a_long_prompt_of_lower_priority_is_passed_until_it_has_aged(place: Place) -> None:
    later, num_retractions = passed(place, -2, enable_priority_scheduling=True)
    assert num_retractions == 0
    assert 0 < max(later) < 3 * AGING_STEPS


@pytest.mark.parametrize("seed", range(12))
def test_requests_that_hold_each_other_back_all_end(seed: int) -> None:
    """Local, split and retracted requests of a full decode node, any of which may close admission to the others."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 8])
    schedule = ScheduleOptions(
        schedule_policy=rng.choice(list(POLICIES)),
        chunked_prefill_size=rng.choice([8, 64]),
        max_running_requests=rng.choice([3, 40]),
        priority_aging_steps=rng.choice([0, 5, 256]),
        enable_priority_scheduling=rng.random() < 0.5,
        priority_scheduling_preemption_threshold=1,
        schedule_conservativeness=rng.choice([0.0, 1.0]),
        num_reserved_decode_tokens=rng.choice([0, 8]),
        in_batch_prefix_caching_deprioritize_threshold=8,
        retracted_wait_steps=rng.choice([0, 3, 30]),
        retract_every=rng.choice([0, 5]),
        disable_overlap_schedule=rng.random() < 0.5,
        enable_mixed_chunk=rng.random() < 0.3,
    )
    decode = NodeShape(
        pool_tokens=rng.choice([96, 160]),
        page_size=page_size,
        context_length=96,
        schedule=schedule,
        host_kv_tokens=rng.choice([0, 64]),
    )
    prefill = dataclasses.replace(decode, pool_tokens=400)
    shape = FleetShape(prefill=prefill, decode=decode, local_prefill_tokens=rng.choice([8, 24]))
    fleet = WatchedFleet(shape, COSTS, seed=seed, audits=True)
    requests = chats(rng, 100, gap_s=0.01, block_tokens=8, prompt_blocks=(1, 6), output_len=(1, 20))
    fleet.submit(dataclasses.replace(request, priority=rng.randrange(6)) for request in requests)
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    assert all(map(is_empty, fleet.nodes.values()))
