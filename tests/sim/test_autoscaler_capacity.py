"""The nodes that the autoscaler asks for, beside the fewest with which the real schedulers meet the SLOs.

The fewest nodes are those of `router plan`: the goodput of a simulated split fleet. What is asked for comes from the
same fleet's own loads, read each second. The table is in docs/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest

from planner.autoscaler.capacity import GOOD_SHARE, Capacity
from planner.autoscaler.observe import FleetLoads
from planner.candidate import Candidate
from planner.figures import Slo
from planner.simulate import fleet_shape, simulate
from planner.simulator.fleet import SimFleet
from planner.traffic.distribution import Lengths, drawn_trace
from planner.traffic.trace import SimRequest
from shared.protocol.messages import Role
from tests.sim.autoscaling import node_reports
from tests.sim.test_autoscaler import PROFILE, SLOW

NODE = msgspec.structs.replace(PROFILE, forward=SLOW)
LOOK_S = 1.0


class Case(NamedTuple):
    """Traffic and SLOs; then nodes of prefill and of decode."""

    rate: float
    prompt: str
    output: str
    ttft_s: float
    itl_s: float
    asked: tuple[int, int]
    fewest: tuple[int, int]

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.ttft_s, itl_s=self.itl_s)

    def requests(self) -> list[SimRequest]:
        prompt, output = Lengths.parse("--prompt", self.prompt), Lengths.parse("--output", self.output)
        trace = drawn_trace(
            rate=self.rate, prompt=prompt, output=output, num_requests=max(150, int(25 * self.rate))
        )
        return list(trace.requests())


CASES = (
    Case(2, "1000", "40", 2.0, 0.06, (2, 2), (1, 2)),
    Case(6, "1000", "40", 2.0, 0.06, (3, 5), (3, 4)),
    Case(2, "1000", "40", 0.8, 0.06, (2, 2), (2, 2)),
    Case(5, "1000", "40", 0.8, 0.06, (3, 4), (3, 4)),
    Case(6, "700:2000", "40:100", 2.0, 0.06, (3, 5), (3, 5)),
    Case(6, "700:2000", "40:100", 1.0, 0.1, (3, 4), (3, 4)),
    Case(3, "150:400", "60:150", 0.5, 0.06, (1, 4), (1, 4)),
    Case(6, "150:400", "60:150", 0.5, 0.06, (1, 7), (1, 6)),
    Case(8, "150:400", "40:100", 0.5, 0.1, (1, 4), (1, 4)),
    Case(12, "150:400", "20:60", 0.4, 0.1, (1, 4), (2, 4)),
    Case(1.5, "3000:5000", "40:100", 5.0, 0.06, (3, 3), (3, 2)),
    Case(3, "3000:5000", "20:60", 4.0, 0.1, (5, 2), (5, 2)),
    Case(12, "150:400", "60:150", 0.5, 0.06, (1, 13), (1, 12)),
)


def meets(case: Case, requests: Sequence[SimRequest], num_prefill: int, num_decode: int) -> bool:
    fleet = Candidate(num_prefill=num_prefill, num_decode=num_decode)
    return simulate(fleet, requests, prefill=NODE, decode=NODE, slo=case.slo).figures.good_share >= GOOD_SHARE


def asked(case: Case, requests: Sequence[SimRequest], num_prefill: int, num_decode: int) -> tuple[int, int]:
    """By the mean of what is demanded after the first third of the time."""
    shape = fleet_shape(Candidate(num_prefill=num_prefill, num_decode=num_decode), NODE, NODE)
    fleet, capacity = SimFleet(shape, NODE.forward), Capacity(NODE, case.slo)
    loads = {role: FleetLoads(role) for role in (Role.PREFILL, Role.DECODE)}
    demands: dict[Role, list[float]] = {role: [] for role in loads}
    fleet.submit(requests)
    while fleet.loop.now + LOOK_S < requests[-1].at_s:
        fleet.run(until=fleet.loop.now + LOOK_S)
        for role, of_role in loads.items():
            nodes = node_reports(fleet, role)
            work = of_role.observe(fleet.loop.now, nodes).work
            if work is not None and fleet.loop.now > requests[-1].at_s / 3:
                demand = capacity.demand(
                    work, is_decode=role is Role.DECODE, num_live=len(nodes), coming_s=()
                )
                demands[role].append(demand.nodes)
    prefill, decode = (math.ceil(sum(one) / len(one)) for one in demands.values())
    return prefill, decode


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:5])))
def test_what_is_asked_for_is_what_a_plan_finds_to_within_a_node(case: Case) -> None:
    requests, (num_prefill, num_decode) = case.requests(), case.fewest
    assert meets(case, requests, num_prefill, num_decode)
    assert num_prefill == 1 or not meets(case, requests, num_prefill - 1, num_decode)
    assert num_decode == 1 or not meets(case, requests, num_prefill, num_decode - 1)
    assert asked(case, requests, *case.fewest) == case.asked, "as in docs/planning.md"
    assert all(abs(ours - fewest) <= 1 for ours, fewest in zip(case.asked, case.fewest, strict=True))
