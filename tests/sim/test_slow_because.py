"""Real schedulers, queues and dispatcher: each stage is delayed in turn, and a slow start names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape
from planner.simulator.node import NodeShape, SimNode
from planner.traffic.trace import SimRequest
from router.dispatch.running_req import RunningReq
from router.dispatch.stages import Start, StartStage
from shared.protocol.messages import Role
from shared.scheduling.plan import ScheduleBatch
from tests.sim.watched_fleet import WatchedFleet

COSTS = CostModel(a=0.004, b=2e-5, c=0.0, d=0.004, e=1e-4, f=0.0, step_s=0.0005)
PROMPT = 1024
PAGE = 32


@dataclass
class Bed:
    """A fleet that has served enough for its nodes to know their rates."""

    prefill_step_s: float = 0.0
    """So much longer does each forward of a prefill node take."""
    num_blocks: int = 0
    decode: NodeShape = field(default_factory=lambda: NodeShape(pool_tokens=16 * PROMPT))
    fleet: WatchedFleet = field(init=False)

    def __post_init__(self) -> None:
        shape = FleetShape(num_prefill=1, num_decode=1, decode=self.decode)
        self.fleet = WatchedFleet(shape, COSTS, on_launch=self._launch)
        for _ in range(6):
            assert self.serve().slow_because is None

    def _launch(self, node: SimNode, batch: ScheduleBatch) -> None:
        if node.role is Role.PREFILL:
            node.clock.wait_until(node.clock() + self.prefill_step_s)

    def send(self, input_len: int = PROMPT, output_len: int = 4) -> RunningReq:
        """A prompt that no node has cached."""
        first, num = self.num_blocks, -(-input_len // PAGE)
        self.num_blocks += num
        request = SimRequest(0.0, input_len, output_len, tuple(range(first, first + num)), PAGE)
        outcome = self.fleet.send(request)
        assert outcome is not None and outcome.req is not None
        return outcome.req

    def serve(self) -> Start:
        """One request to its end."""
        req = self.send()
        self.fleet.run()
        assert req.start is not None
        return req.start


def slow_prefill(bed: Bed) -> None:
    bed.prefill_step_s = 0.5


def slow_link(bed: Bed) -> None:
    model = bed.fleet.transport.model
    bed.fleet.transport.model = replace(model, bandwidth_bytes_s=model.bandwidth_bytes_s / 50)


def full_decode_node(bed: Bed) -> None:
    """For longer than a slow prefill takes, since a prompt is computed ahead meanwhile."""
    for _ in range(2):
        bed.send(input_len=7 * PROMPT + 512, output_len=512)
    bed.fleet.run(until=bed.fleet.loop.now + 0.5)


def busy_prefill_node(bed: Bed) -> None:
    for _ in range(8):
        bed.send()


DELAYS: dict[StartStage, Callable[[Bed], None]] = {
    StartStage.PREFILL: slow_prefill,
    StartStage.TRANSFER: slow_link,
    StartStage.RESERVATION: full_decode_node,
    StartStage.QUEUE: busy_prefill_node,
}


@pytest.mark.parametrize("stage", DELAYS, ids=str)
def test_the_delayed_stage_is_named(stage: StartStage) -> None:
    bed = Bed()
    DELAYS[stage](bed)
    assert bed.serve().slow_because is stage


def test_a_run_without_delays_names_no_stage() -> None:
    bed = Bed()
    for input_len in (40, 300, PROMPT, 3 * PROMPT) * 6:
        req = bed.send(input_len)
        bed.fleet.run()
        assert req.start is not None and req.start.slow_because is None
        assert req.start.ttft_s > 0


def test_a_prefill_node_that_died_is_the_cause() -> None:
    bed = Bed()
    bed.fleet.start("p0001", Role.PREFILL)
    bed.prefill_step_s = 0.4
    req = bed.send()
    name = req.nodes[0].ref.node_id
    bed.fleet.run(until=bed.fleet.loop.now + 0.3)
    bed.prefill_step_s = 0.0
    bed.fleet.kill(name)
    bed.fleet.run()
    assert req.start is not None and req.start.slow_because is StartStage.FAILOVER
