"""A fleet that gets about twice as much as it can serve."""

from __future__ import annotations

import random

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape, SimFleet
from planner.simulator.node import NodeShape
from shared.config import ScheduleOptions
from tests.bench.stats import percentile
from tests.sim.workloads import unrelated

COSTS = CostModel(a=0.002, b=0.0005, c=0.0, d=0.02, e=0.0001, f=0.0)
"""A prefill node computes about 1,990 tokens a second."""
LIMIT_S = 2.0
SECONDS = 12


def run(
    limit_s: float | None, *, requests_per_s: int, output_len: int, decode_pool: int, decode_rows: int
) -> SimFleet:
    """Two nodes of each role, and prompts of 256 tokens that share nothing."""
    shape = FleetShape(
        num_prefill=2,
        num_decode=2,
        prefill=NodeShape(pool_tokens=65_536),
        decode=NodeShape(pool_tokens=decode_pool, schedule=ScheduleOptions(max_running_requests=decode_rows)),
        prefill_policy="ttft",
        decode_policy="ttft",
        ttft_limit_s=limit_s,
    )
    fleet = SimFleet(shape, COSTS)
    num, gap_s = requests_per_s * SECONDS, 1 / requests_per_s
    fleet.submit(unrelated(random.Random(0), num, gap_s=gap_s, input_lens=[256], output_len=output_len))
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    return fleet


def ttft_p99_s(fleet: SimFleet) -> float:
    return percentile(sorted(outcome.served.ttft_s for outcome in fleet.outcomes.values()), 99)


@pytest.mark.parametrize(
    ("requests_per_s", "output_len", "decode_pool", "decode_rows"),
    [
        pytest.param(31, 4, 65_536, 64, id="prompts"),
        pytest.param(30, 20, 1_024, 64, id="pages of the decode nodes"),
        pytest.param(2, 200, 65_536, 2, id="rows of the decode nodes"),
    ],
)
def test_with_a_limit_the_requests_that_are_taken_wait_no_longer(
    requests_per_s: int, output_len: int, decode_pool: int, decode_rows: int
) -> None:
    load = {
        "requests_per_s": requests_per_s,
        "output_len": output_len,
        "decode_pool": decode_pool,
        "decode_rows": decode_rows,
    }
    without, limited = run(None, **load), run(LIMIT_S, **load)
    assert len(without.outcomes) == requests_per_s * SECONDS
    assert ttft_p99_s(without) > 5 * LIMIT_S
    assert ttft_p99_s(limited) < 1.25 * LIMIT_S
