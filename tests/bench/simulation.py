"""What the simulator says: scheduling policies compared on a trace, and a fleet of a thousand nodes.

policy   hit ratio and TTFT of each `--schedule-policy` on one prefill node whose KV pool is small for its traffic:
         a public trace of conversations, which share little, and few-shot prompts, which share much
fleet    100,000 requests over 1,000 nodes: the minutes that takes here. As they are several, it runs only when asked
         for: `python -m tests.bench.simulation fleet`

Everything above the device and the network is the real code; see tests/sim/README.md. Times are virtual seconds of
the cost model in cost_model.json, except the wall minutes.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from shared.config import ScheduleOptions
from shared.scheduling.schedule_policy import POLICIES
from tests.bench.table import report
from tests.sim.simulator.cost_model import CostModel, load_cost_model
from tests.sim.simulator.fleet import FleetShape, SimFleet
from tests.sim.simulator.node import NodeShape
from tests.sim.simulator.trace import MOONCAKE, SimRequest, load_trace, scaled
from tests.sim.simulator.workloads import few_shot

SCALE = 16
"""Lengths of the trace are divided by this: a block of 512 tokens becomes one page of 32."""
POLICY_ROWS = 3000
POLICY_RATE = 2.6
"""Times the trace's own rate: one prefill node is then just about saturated, so that there is a queue to order."""
TRACE_POOL_TOKENS = 65_536
FEW_SHOT_REQUESTS = 600
FEW_SHOT_GAP_S = 0.06
FEW_SHOT_POOL_TOKENS = 8_192
"""A third of what its 24 shared prompts take."""
DECODE_POOL_TOKENS = 262_144
"""Decode nodes are large here: what is compared is the order of prefill."""

FLEET_NODES = 1000
FLEET_REQUESTS = 100_000
FLEET_CELLS = 2
"""Fleets of their own, with a router each, one in each process: as many as there are cores to compute them."""
FLEET_RATE = 40.0
REPLAY_GAP_S = 0.05
"""Replays begin so far apart."""


def run_policy(workload: str, policy: str, costs: CostModel) -> dict[str, Any]:
    """One prefill node under one policy."""
    requests: Iterable[SimRequest]
    if workload == "few_shot":
        pool_tokens = FEW_SHOT_POOL_TOKENS
        requests = few_shot(random.Random(0), FEW_SHOT_REQUESTS, gap_s=FEW_SHOT_GAP_S)
    else:
        pool_tokens = TRACE_POOL_TOKENS
        requests = itertools.islice(scaled(load_trace(), scale=SCALE, rate=POLICY_RATE), POLICY_ROWS)
    schedule = ScheduleOptions(schedule_policy=policy, max_running_requests=256)
    shape = FleetShape(
        num_prefill=1,
        num_decode=4,
        prefill=NodeShape(pool_tokens=pool_tokens, schedule=schedule),
        decode=NodeShape(pool_tokens=DECODE_POOL_TOKENS, schedule=schedule),
    )
    fleet = SimFleet(shape, costs)
    fleet.submit(requests)
    fleet.run()
    figures = summary(fleet)
    return {
        "bench": "schedule_policy",
        "workload": workload,
        "policy": policy,
        "pool_tokens": pool_tokens,
        **figures,
    }


def run_cell(cell: int) -> dict[str, Any]:
    """One of the cells of the large fleet. Deterministic: replays, nodes and router are its own."""
    gc.disable()  # nothing here makes cycles worth finding
    num_nodes, num_requests = FLEET_NODES // FLEET_CELLS, FLEET_REQUESTS // FLEET_CELLS
    rows = load_trace()
    replays = range(cell, FLEET_CELLS * -(-num_requests // len(rows)), FLEET_CELLS)
    shape = NodeShape(poll_s=1.0, schedule=ScheduleOptions())
    fleet = SimFleet(
        FleetShape(
            num_prefill=num_nodes // 2, num_decode=num_nodes - num_nodes // 2, prefill=shape, decode=shape
        ),
        load_cost_model(),
        seed=cell,
    )
    streams = (
        scaled(rows, scale=SCALE, rate=FLEET_RATE, replay=replay, start_s=REPLAY_GAP_S * replay)
        for replay in replays
    )
    fleet.submit(itertools.islice(heapq.merge(*streams, key=lambda r: r.at_s), num_requests))
    fleet.run()
    return {
        **summary(fleet),
        "ttfts": [outcome.ttft_s for outcome in fleet.outcomes.values() if outcome.ok],
        "forwards": sum(node.stream.num_forwards for node in fleet.nodes.values()),
        "cpu_s": time.process_time(),
    }


def run_fleet() -> dict[str, Any]:
    """All cells at once."""
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(FLEET_CELLS) as pool:
        cells = pool.map(run_cell, range(FLEET_CELLS))
    wall_s = time.perf_counter() - start
    ttfts = sorted(ttft for cell in cells for ttft in cell["ttfts"])
    return {
        "bench": "simulated_fleet",
        "nodes": FLEET_NODES,
        "requests": sum(cell["requests"] for cell in cells),
        "cells": FLEET_CELLS,
        "wall_minutes": round(wall_s / 60, 2),
        "cpu_minutes": round(sum(cell["cpu_s"] for cell in cells) / 60, 2),
        "ok": sum(cell["ok"] for cell in cells),
        "forwards": sum(cell["forwards"] for cell in cells),
        "virtual_s": max(cell["virtual_s"] for cell in cells),
        "ttft_p50_s": round(percentile(ttfts, 50), 3),
        "ttft_p99_s": round(percentile(ttfts, 99), 3),
    }


def summary(fleet: SimFleet) -> dict[str, Any]:
    """What a workload came to."""
    ttfts = sorted(outcome.ttft_s for outcome in fleet.outcomes.values() if outcome.ok)
    return {
        "requests": len(fleet.outcomes),
        "ok": len(ttfts),
        "hit_ratio": round(fleet.hit_ratio(), 4),
        "ttft_mean_s": round(sum(ttfts) / len(ttfts), 3),
        "ttft_p50_s": round(percentile(ttfts, 50), 3),
        "ttft_p99_s": round(percentile(ttfts, 99), 3),
        "virtual_s": round(fleet.loop.now, 1),
    }


def percentile(ordered: list[float], percent: int) -> float:
    """The nearest rank of a sorted list."""
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]


def main() -> Iterator[dict[str, Any]]:
    """Every policy on both workloads."""
    costs = load_cost_model()
    for workload in (MOONCAKE, "few_shot"):
        for policy in POLICIES:
            yield run_policy(workload, policy, costs)


if __name__ == "__main__":
    report([run_fleet()] if "fleet" in sys.argv[1:] else main())
