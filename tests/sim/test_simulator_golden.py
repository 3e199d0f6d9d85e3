"""Golden traces of decisions: a change of the scheduler shows as a diff of `decisions.golden.json`.

After a change that is meant: `python -m tests.sim.test_simulator_golden` writes the file anew; read the diff.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape
from planner.simulator.node import NodeShape, SimNode
from shared.config import ScheduleOptions
from shared.scheduling.plan import ScheduleBatch
from shared.scheduling.schedule_policy import POLICIES
from tests.sim.decisions import DecisionLog
from tests.sim.watched_fleet import WatchedFleet
from tests.sim.workloads import chats

GOLDEN = Path(__file__).with_name("decisions.golden.json")
COSTS = CostModel(a=0.004, b=2e-4, c=1e-8, d=0.008, e=2e-4, f=1e-6)
"""Fixed: the fitted model may be measured anew, and time decides who waits with whom."""

Decisions = dict[str, dict[str, list[str]]]


def decide(policy: str) -> dict[str, list[str]]:
    """What one prefill and one decode node decide on a burst that overflows both."""
    schedule = ScheduleOptions(
        schedule_policy=policy,
        chunked_prefill_size=16,
        max_running_requests=24,
        num_reserved_decode_tokens=2,
        in_batch_prefix_caching_deprioritize_threshold=4,
    )
    prefill = NodeShape(pool_tokens=160, page_size=4, context_length=96, schedule=schedule)
    decode = NodeShape(pool_tokens=320, page_size=4, context_length=96, schedule=schedule)
    log = DecisionLog()
    fleet = WatchedFleet(
        FleetShape(prefill=prefill, decode=decode), COSTS, on_launch=log.on_launch, audits=True
    )
    fleet.submit(chats(random.Random(5), 24, gap_s=0.001, block_tokens=4, output_len=(6, 20)))
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    return log.text()


@pytest.mark.parametrize("policy", list(POLICIES))
def test_decisions_are_those_of_the_golden_trace(policy: str) -> None:
    golden: Decisions = json.loads(GOLDEN.read_text())
    assert decide(policy) == golden[policy]


def test_policies_decide_differently() -> None:
    golden: Decisions = json.loads(GOLDEN.read_text())
    assert set(golden) == set(POLICIES)
    assert len({json.dumps(decisions) for decisions in golden.values()}) == len(POLICIES)


def test_the_golden_burst_retracts() -> None:
    """A request that is extended again on the decode node has been retracted."""
    golden: Decisions = json.loads(GOLDEN.read_text())
    assert any(line.startswith("extend") for line in golden["fcfs"]["d0000"])


# ------------------------------------------------------------------------- measured speeds
NEAR_COSTS = CostModel(a=3e-5, b=1e-6, c=1e-9, d=0.008, e=2e-4, f=1e-6)
"""With these a prefill costs about as much as two copies, so that a small error of a measurement turns a decision."""


class OnMachine(DecisionLog):
    """Notes decisions; each forward takes `delay_s` of real time, which is no time of the simulation."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self._delay_s = delay_s

    def on_launch(self, node: SimNode, batch: ScheduleBatch) -> None:
        super().on_launch(node, batch)
        time.sleep(self._delay_s)


def decide_by_speed(delay_s: float) -> tuple[dict[str, list[str]], int, int]:
    """What was decided, and how many retractions went each way."""
    schedule = ScheduleOptions(
        retract_policy="auto",
        chunked_prefill_size=16,
        max_running_requests=24,
        num_reserved_decode_tokens=2,
        retract_every=2,
    )
    shape = NodeShape(pool_tokens=256, page_size=4, context_length=96, schedule=schedule, host_kv_tokens=512)
    log = OnMachine(delay_s)
    fleet = WatchedFleet(
        FleetShape(prefill=shape, decode=shape, local_prefill_tokens=12),
        NEAR_COSTS,
        on_launch=log.on_launch,
        audits=True,
    )
    fleet.submit(chats(random.Random(1), 120, gap_s=0.002, block_tokens=4, output_len=(6, 40)))
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    count = fleet.nodes["d0000"].scheduler.batcher.retraction.count
    return log.text(), count.num_host, count.num_recompute


def test_a_slower_machine_decides_the_same() -> None:
    quick, num_host, num_recompute = decide_by_speed(0)
    assert min(num_host, num_recompute) > 200, "in simulated time each way is the cheaper one about as often"
    assert decide_by_speed(0.001) == (quick, num_host, num_recompute)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({policy: decide(policy) for policy in POLICIES}, indent=1) + "\n")
