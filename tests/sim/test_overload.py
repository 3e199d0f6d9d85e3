"""A fleet that gets more than it can serve, from clients of two API keys."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape, SimFleet
from router.dispatch.policy import ttft
from tests.sim.workloads import unrelated

COSTS = CostModel(a=0.002, b=0.0005, c=0.0, d=0.02, e=0.0001, f=0.0)
"""A prefill node computes about 1,990 tokens a second."""


@pytest.mark.parametrize("is_fair", [True, False], ids=["fair", "first come first served"])
def test_a_greedy_key_does_not_delay_another(is_fair: bool) -> None:
    """100 prompts of one key take 6.4 s. Of another key, 5 come a little later: with a fair share 0.7 s of work."""
    shape = FleetShape(num_prefill=2, num_decode=2, prefill_policy=ttft, decode_policy=ttft)
    fleet = SimFleet(shape, COSTS)
    requests = unrelated(random.Random(0), 105, gap_s=0.001, input_lens=[256])
    keys = [1 if at < 100 else 2 for at in range(105)]
    fleet.submit(
        replace(request, api_key=key if is_fair else None)
        for request, key in zip(requests, keys, strict=True)
    )
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    ttfts = [outcome.ttft_s for outcome in fleet.outcomes.values()]
    assert (max(ttfts[100:]) < 2.0) is is_fair
    assert max(ttfts) < 8.0
