"""Prediction beside measurement: what counts as an error, as a spread and as a hit."""

from __future__ import annotations

import pytest

from planner.candidate import Candidate
from planner.cost_model import CostModel
from tests.bench import planner
from tests.bench.planner import Added, Part
from tests.bench.real_fleet import BUILTIN
from tests.bench.recorded import MOONCAKE
from tests.bench.timed_node import TimedNodes

EVEN = {"goodput": 2.0, "ttft_mean_ms": 100.0, "ttft_p99_ms": 400.0, "itl_p99_ms": 30.0}


def test_a_figure_hits_within_its_bound_or_within_what_the_rounds_differ() -> None:
    same = [EVEN, EVEN]
    assert planner.compared(EVEN, same)["hit"]
    near = planner.compared(EVEN | {"ttft_mean_ms": 109.0, "ttft_p99_ms": 301.0}, same)
    assert near["hit"] and near["ttft_mean_ms_error"] == 0.09 and near["ttft_p99_ms_error"] == -0.247
    far = planner.compared(EVEN | {"goodput": 1.7, "itl_p99_ms": 40.0}, same)
    assert not far["hit"] and far["missed"] == "goodput, itl_p99_ms"
    noisy = [EVEN | {"goodput": 1.5}, EVEN | {"goodput": 2.5}]
    row = planner.compared(EVEN | {"goodput": 1.1}, noisy)
    assert row["hit"] and (row["goodput"], row["goodput_error"], row["goodput_differ"]) == (2.0, -0.45, 0.5)


def test_misses_come_first_and_the_farthest_first_of_all() -> None:
    rows = [
        planner.compared(EVEN | {"ttft_mean_ms": ms}, [EVEN]) | {"bench": "error", "cpu_share": 0.2}
        for ms in (101.0, 120.0, 50.0)
    ]
    assert [row["ttft_mean_ms_predicted"] for row in sorted(rows, key=planner.order)] == [50.0, 120.0, 101.0]
    told = planner.summary(rows)
    assert (told["cases"], told["hits"]) == (3, 1)
    assert (told["ttft_mean_ms_median_error"], told["ttft_mean_ms_largest_error"]) == (0.2, 0.5)


def test_a_part_of_a_trace_begins_at_zero_and_keeps_its_rate_and_its_prefixes() -> None:
    part = Part(trace=MOONCAKE, scale=8, rate=2.0, start_s=600.0, replayed_s=20.0)
    requests = part.requests(context_length=16_384)
    slower = Part(trace=MOONCAKE, scale=8, rate=1.0, start_s=600.0, replayed_s=40.0).requests(16_384)
    assert 0 <= requests[0].at_s < 1 and 19 < requests[-1].at_s < 20
    assert [one.blocks for one in requests] == [one.blocks for one in slower]
    assert [one.at_s * 2 for one in requests] == pytest.approx([one.at_s for one in slower])
    blocks = [block for one in requests for block in one.blocks]
    assert len(set(blocks)) < len(blocks)


def test_no_part_is_used_both_for_fitting_and_for_the_error() -> None:
    fitted = range(
        int(planner.FIT.start_s), int(planner.FIT.start_s + planner.FIT.replayed_s * planner.FIT.rate) + 1
    )
    for _, part in planner.CASES:
        end_s = part.start_s + part.replayed_s * part.rate
        assert part.trace != planner.FIT.trace or part.start_s > fitted[-1] or end_s < fitted[0]


def test_a_prediction_without_added_costs_is_that_of_the_forwards() -> None:
    nodes = TimedNodes(costs=CostModel(a=0.1, b=0.0, c=0.0, d=0.01, e=0.0, f=0.0))
    requests = Part(trace=MOONCAKE, scale=64, rate=1.0, start_s=0.0, replayed_s=1.0).requests(16_384)[:1]
    run = planner.predict(
        Candidate(num_prefill=1, num_decode=1), requests, planner.timed_profile(nodes, Added())
    )
    assert run.figures.ttft_s.mean == pytest.approx(0.1, abs=0.01)


def test_the_scheduler_of_real_nodes_costs_what_was_measured_on_them() -> None:
    measured = CostModel(a=0.1, b=0.0, c=0.0, d=0.01, e=0.0, f=0.0, step_s=0.0003, step_request_s=1e-5)
    added = Added(step_s=0.002, token_s=1e-4)
    assert planner.profile(BUILTIN, measured, added).forward == measured
    timed = planner.timed_profile(TimedNodes(costs=measured), added).forward
    assert (timed.step_s, timed.d) == (0.002, 0.01)
