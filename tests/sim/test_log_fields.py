"""The life of a request in the log: every line on router and nodes has its rid, its key and so its attempt."""

from __future__ import annotations

import logging
import shlex

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape, Outcome
from planner.traffic.trace import SimRequest
from shared.protocol.messages import Role, Work
from shared.protocol.sampling_params import SamplingParams
from tests.sim.watched_fleet import WatchedFleet

COSTS = CostModel(a=0.0073, b=1.4e-4, c=1.6e-9, d=0.0097, e=2.3e-4, f=3.8e-6)


def test_every_line_of_a_request_that_failed_over(caplog: pytest.LogCaptureFixture) -> None:
    fleet = WatchedFleet(FleetShape(num_prefill=2, num_decode=1), COSTS)
    fleet.outcomes["1"] = Outcome("1", SimRequest(0.0, 800, 4, (), 1), 0.0, None)
    with caplog.at_level(logging.DEBUG, "baton"):
        work = Work(tuple(range(100, 900)), SamplingParams(max_new_tokens=4))
        req = fleet.dispatcher.start(work, lambda: None, rid="mine")
        fleet.run(until=0.05)
        fleet.kill(next(node for node in req.nodes if node.role is Role.PREFILL).ref.node_id)
        fleet.run()
    assert req.ended and len(req.output_ids) == 4
    lines = [shlex.split(record.message) for record in caplog.records]
    told = [(line[0], dict(word.split("=", 1) for word in line[1:])) for line in lines]
    life = [(name, fields["attempt"]) for name, fields in told if fields.get("rid") == "mine"]
    assert {name for name, _ in life} == {
        *("dispatched", "failover", "sequence_ended"),
        *("req_began", "req_ended"),
    }
    assert life[0] == ("dispatched", "0") and life[-1][1] == "1"
    assert ("failover", "0") in life and ("dispatched", "1") in life
    for _, fields in told:
        if "rid" in fields or "attempt" in fields:
            assert (fields["rid"], fields["req"], fields["router"]) == ("mine", "1", "router")
