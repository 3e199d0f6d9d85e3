"""How long it takes here to simulate 100,000 requests over 1,000 nodes with the real scheduler.

Everything above the device and the network is the real code; see docs/simulator.md. Times are virtual seconds of
the costs in profile.json, except the wall and CPU minutes.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from typing import Any

from planner.simulator.fleet import FleetShape, SimFleet
from planner.simulator.node import NodeShape
from shared.config import ScheduleOptions
from tests.bench.fitted import load_cost_model
from tests.bench.recorded import load_trace, scaled
from tests.bench.simulation import SCALE, totals
from tests.bench.stats import percentile
from tests.bench.table import Row

NODES = 1000
REQUESTS = 100_000
CELLS = 2
"""Fleets of their own, with a router each, one in each process: as many as there are cores to compute them."""
RATE = 40.0
REPLAY_GAP_S = 0.05
"""Replays begin so far apart."""


def run_cell(cell: int) -> dict[str, Any]:
    """One of the cells of the large fleet. Deterministic: replays, nodes and router are its own."""
    gc.disable()  # nothing here makes cycles worth finding
    num_nodes, num_requests = NODES // CELLS, REQUESTS // CELLS
    rows = load_trace()
    replays = range(cell, CELLS * -(-num_requests // len(rows)), CELLS)
    shape = NodeShape(poll_s=1.0, schedule=ScheduleOptions())
    fleet = SimFleet(
        FleetShape(
            num_prefill=num_nodes // 2, num_decode=num_nodes - num_nodes // 2, prefill=shape, decode=shape
        ),
        load_cost_model(),
        seed=cell,
    )
    streams = (
        scaled(rows, scale=SCALE, rate=RATE, replay=replay, start_s=REPLAY_GAP_S * replay)
        for replay in replays
    )
    fleet.submit(itertools.islice(heapq.merge(*streams, key=lambda r: r.at_s), num_requests))
    fleet.run()
    return {
        **totals(fleet),
        "ttfts": [outcome.ttft_s for outcome in fleet.outcomes.values() if outcome.ok],
        "forwards": sum(node.stream.num_forwards for node in fleet.nodes.values()),
        "cpu_s": time.process_time(),
    }


def main() -> Iterator[dict[str, Any]]:
    """All cells at once."""
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(CELLS) as pool:
        cells = pool.map(run_cell, range(CELLS))
    wall_s = time.perf_counter() - start
    ttfts = sorted(ttft for cell in cells for ttft in cell["ttfts"])
    yield {
        "bench": "simulated_fleet",
        "nodes": NODES,
        "requests": sum(cell["requests"] for cell in cells),
        "cells": CELLS,
        "wall_minutes": round(wall_s / 60, 2),
        "cpu_minutes": round(sum(cell["cpu_s"] for cell in cells) / 60, 2),
        "ok": sum(cell["ok"] for cell in cells),
        "forwards": sum(cell["forwards"] for cell in cells),
        "virtual_s": max(cell["virtual_s"] for cell in cells),
        "ttft_p50_s": round(percentile(ttfts, 50), 3),
        "ttft_p99_s": round(percentile(ttfts, 99), 3),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The minutes it took."""
    return {key: rows[0][key] for key in ("wall_minutes", "cpu_minutes", "requests", "ok")}
