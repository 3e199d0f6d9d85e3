"""What the simulator says: scheduling policies compared on two workloads.

Hit ratio and TTFT of each `--schedule-policy` on one prefill node whose KV pool is small for its traffic: a public
trace of conversations, which share little, and few-shot prompts, which share much.

Everything above the device and the network is the real code; see tests/sim/README.md. Times are virtual seconds of
the cost model in cost_model.json.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shared.config import ScheduleOptions
from shared.scheduling.schedule_policy import POLICIES
from tests.bench.stats import percentile
from tests.bench.table import Row
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
    return {
        "bench": "schedule_policy",
        "workload": workload,
        "policy": policy,
        "pool_tokens": pool_tokens,
        **totals(fleet),
    }


def totals(fleet: SimFleet) -> dict[str, Any]:
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


def main() -> Iterator[dict[str, Any]]:
    """Every policy on both workloads."""
    costs = load_cost_model()
    for workload in (MOONCAKE, "few_shot"):
        for policy in POLICIES:
            yield run_policy(workload, policy, costs)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The best policy on each workload, by hit ratio, against `fcfs`."""
    best: dict[str, Any] = {}
    for row in rows:
        name = row["workload"]
        if row["policy"] == "fcfs":
            best[f"{name}_fcfs_hit_ratio"] = row["hit_ratio"]
        if row["hit_ratio"] > best.get(f"{name}_best_hit_ratio", 0):
            best |= {f"{name}_best_hit_ratio": row["hit_ratio"], f"{name}_best_policy": row["policy"]}
    return best
