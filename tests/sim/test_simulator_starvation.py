"""Nobody starves: bounds on how long a request waits, for every policy, while more comes than can be served."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from shared.config import ScheduleOptions
from shared.scheduling.schedule_batch import ScheduleBatch
from shared.scheduling.schedule_policy import POLICIES
from tests.sim.simulator.cost_model import CostModel
from tests.sim.simulator.fleet import FleetShape, SimFleet
from tests.sim.simulator.node import NodeShape, SimNode
from tests.sim.simulator.trace import SimRequest
from tests.sim.simulator.workloads import chats

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

    def on_launch(self, node: SimNode, batch: ScheduleBatch) -> None:
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


def serve(policy: str, aging_steps: int) -> tuple[WaitLog, SimFleet]:
    schedule = ScheduleOptions(
        schedule_policy=policy,
        chunked_prefill_size=CHUNK,
        max_running_requests=400,
        priority_aging_steps=aging_steps,
        in_batch_prefix_caching_deprioritize_threshold=8,
    )
    shape = NodeShape(pool_tokens=40_000, page_size=8, context_length=256, schedule=schedule)
    log = WaitLog()
    fleet = SimFleet(FleetShape(prefill=shape, decode=shape), COSTS, on_launch=log.on_launch)
    fleet.submit(flood(random.Random(1)))
    fleet.run(max_events=200_000)
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
    log, _ = serve("fcfs", 0)
    assert worst_excess(log, 1) <= SLACK


@pytest.mark.parametrize("policy", ["lof"])
def test_without_aging_somebody_starves(policy: str) -> None:
    """So the bound above is one that can be broken."""
    log, _ = serve(policy, 0)
    assert worst_excess(log, AGING_STEPS) > 10 * SLACK
