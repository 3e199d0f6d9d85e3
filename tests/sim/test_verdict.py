"""Real schedulers, queues and dispatcher: each stage is delayed in turn, and two at once. The verdict names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape, SimFleet
from planner.simulator.node import NodeShape, SimNode
from planner.traffic.trace import SimRequest
from router.dispatch.running_req import RunningReq
from router.dispatch.verdict import Start, StartStage
from shared.config import ScheduleOptions
from shared.protocol.messages import Role
from shared.scheduling.plan import ScheduleBatch

COSTS = CostModel(a=0.004, b=2e-5, c=0.0, d=0.004, e=1e-4, f=0.0, step_s=0.0005)
PROMPT = 1024
PAGE = 32


@dataclass
class Bed:
    """A fleet that has served enough for the router to know what is usual."""

    prefill_step_s: float = 0.0
    """So much longer does each forward of a prefill node take."""
    num_blocks: int = 0
    decode: NodeShape = field(default_factory=lambda: NodeShape(pool_tokens=16 * PROMPT))
    fleet: SimFleet = field(init=False)

    def __post_init__(self) -> None:
        shape = FleetShape(num_prefill=1, num_decode=1, decode=self.decode)
        self.fleet = SimFleet(shape, COSTS, on_launch=self._launch)
        for _ in range(6):
            assert self.serve().verdict is None

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
    usual = bed.serve().ttft_s
    DELAYS[stage](bed)
    start = bed.serve()
    assert start.verdict is not None
    assert [cause.stage for cause in start.verdict.causes] == [stage], start.verdict.text
    assert start.verdict.without_s < 2 * usual


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (StartStage.PREFILL, StartStage.TRANSFER),
        (StartStage.RESERVATION, StartStage.PREFILL),
        (StartStage.RESERVATION, StartStage.TRANSFER),
        (StartStage.QUEUE, StartStage.TRANSFER),
    ],
)
def test_both_of_two_delayed_stages_are_named(first: StartStage, second: StartStage) -> None:
    bed = Bed()
    usual = bed.serve().ttft_s
    for stage in (first, second):
        DELAYS[stage](bed)
    start = bed.serve()
    assert start.verdict is not None
    causes = start.verdict.causes
    assert {cause.stage for cause in causes} == {first, second}, start.verdict.text
    assert [cause.excess_s for cause in causes] == sorted((c.excess_s for c in causes), reverse=True)
    assert start.verdict.without_s < 2 * usual


def test_a_run_without_delays_has_no_verdict() -> None:
    bed = Bed()
    for input_len in (40, 300, PROMPT, 3 * PROMPT) * 6:
        req = bed.send(input_len)
        bed.fleet.run()
        assert req.start is not None and req.start.verdict is None
        assert req.start.ttft_s > 0


def test_a_decode_node_that_runs_as_many_as_it_may_is_not_said_to_lack_pages() -> None:
    schedule = ScheduleOptions(max_running_requests=1)
    bed = Bed(decode=NodeShape(pool_tokens=16 * PROMPT, schedule=schedule))
    bed.send(output_len=256)
    bed.fleet.run(until=bed.fleet.loop.now + 0.5)
    verdict = bed.serve().verdict
    assert verdict is not None
    assert " waiting for a place on d0000, which runs 1 request at most; with a free decode" in verdict.text


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
    assert req.start is not None and req.start.verdict is not None
    (cause,) = req.start.verdict.causes
    assert cause.stage is StartStage.FAILOVER and f"prefill node {name} was lost" in cause.because
