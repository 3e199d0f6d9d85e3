"""`--retract-policy auto` weighs measured speeds. In the simulator they follow from the seed, and so do decisions."""

from __future__ import annotations

import random
import time

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape
from planner.simulator.node import NodeShape, SimNode
from shared.config import ScheduleOptions
from shared.scheduling.plan import ScheduleBatch
from tests.sim.decisions import DecisionLog
from tests.sim.watched_fleet import WatchedFleet
from tests.sim.workloads import chats

COSTS = CostModel(a=3e-5, b=1e-6, c=1e-9, d=0.008, e=2e-4, f=1e-6)
"""With these a prefill costs about as much as two copies, so that a small error of a measurement turns a decision."""


class OnMachine(DecisionLog):
    """Notes decisions; each forward takes `delay_s` of real time, which is no time of the simulation."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self._delay_s = delay_s

    def on_launch(self, node: SimNode, batch: ScheduleBatch) -> None:
        super().on_launch(node, batch)
        time.sleep(self._delay_s)


def run(delay_s: float) -> tuple[dict[str, list[str]], int, int]:
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
        COSTS,
        on_launch=log.on_launch,
        audits=True,
    )
    fleet.submit(chats(random.Random(1), 120, gap_s=0.002, block_tokens=4, output_len=(6, 40)))
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    count = fleet.nodes["d0000"].scheduler.batcher.retraction.count
    return log.text(), count.num_host, count.num_recompute


def test_a_slower_machine_decides_the_same() -> None:
    quick, num_host, num_recompute = run(0)
    assert min(num_host, num_recompute) > 200, "in simulated time each way is the cheaper one about as often"
    assert run(0.001) == (quick, num_host, num_recompute)
