"""Golden traces of decisions: a change of the scheduler shows as a diff of `decisions.golden.json`.

After a change that is meant: `python -m tests.sim.test_simulator_golden` writes the file anew; read the diff.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape
from planner.simulator.node import NodeShape
from shared.config import ScheduleOptions
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


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({policy: decide(policy) for policy in POLICIES}, indent=1) + "\n")
