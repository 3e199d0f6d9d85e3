"""What the simulator says: scheduling policies compared on two workloads, and short prompts beside long ones.

Hit ratio and TTFT of each `--schedule-policy` on one prefill node whose KV pool is small for its traffic: a public
trace of conversations, which share little, and few-shot prompts, which share much.

TTFT of short and of long prompts on one prefill node, with and without --short-prompt-share.

TTFT while a decode node is short of pages, with and without --prefill-ahead-share.

Everything above the device and the network is the real code; see docs/simulator.md. Times are virtual seconds of
the costs in profile.json.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape, SimFleet
from planner.simulator.node import NodeShape
from planner.traffic.trace import SimRequest
from shared.config import ScheduleOptions
from shared.protocol.messages import Role
from shared.scheduling.schedule_policy import POLICIES
from tests.bench.fitted import load_cost_model
from tests.bench.recorded import MOONCAKE, load_trace, scaled
from tests.bench.stats import percentile
from tests.bench.table import Row
from tests.sim.workloads import few_shot, unrelated

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
SHORT_TOKENS, LONG_TOKENS = 64, 8192
MIX_REQUESTS = 1500
MIX_LOAD = 0.8
MIX_COSTS = CostModel(a=0.002, b=1e-4, c=1e-9, d=0.01, e=1e-4, f=0.0)
"""A node that prefills 10,000 tokens a second: a small GPU."""
FULL_REQUESTS = 400
FULL_DECODE_POOL_TOKENS = 9_216
"""Room for 4 to 8 of the requests below."""
FULL_GAPS_S = (0.4, 0.32, 0.28)


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


def run_mix(share: float) -> dict[str, Any]:
    """Nine short prompts for each long one, with which a prefill node is busy for 0.8 of the time."""
    schedule = ScheduleOptions(short_prompt_share=share, max_running_requests=256)
    node = NodeShape(pool_tokens=TRACE_POOL_TOKENS, context_length=2 * LONG_TOKENS, schedule=schedule)
    decode = NodeShape(pool_tokens=DECODE_POOL_TOKENS, context_length=2 * LONG_TOKENS, schedule=schedule)
    costs = MIX_COSTS
    fleet = SimFleet(FleetShape(num_decode=2, prefill=node, decode=decode), costs)
    chunk = schedule.chunk_tokens
    chunks = [(start, chunk) for start in range(0, LONG_TOKENS, chunk)]
    busy_s = 0.9 * costs.extend_s([(0, SHORT_TOKENS)]) + 0.1 * sum(costs.extend_s([span]) for span in chunks)
    lens = [SHORT_TOKENS] * 9 + [LONG_TOKENS]
    fleet.submit(unrelated(random.Random(0), MIX_REQUESTS, gap_s=busy_s / MIX_LOAD, input_lens=lens))
    fleet.run()
    row: dict[str, Any] = {"bench": "short_prompts", "short_prompt_share": share}
    for name, input_len in (("short", SHORT_TOKENS), ("long", LONG_TOKENS)):
        outcomes = [o for o in fleet.outcomes.values() if o.request.input_len == input_len]
        ttfts = sorted(outcome.ttft_s for outcome in outcomes if outcome.ok)
        row |= {
            f"{name}_ok": len(ttfts),
            f"{name}_ttft_p50_s": round(percentile(ttfts, 50), 3),
            f"{name}_ttft_p99_s": round(percentile(ttfts, 99), 3),
        }
    return row


def run_full(share: float, gap_s: float) -> dict[str, Any]:
    """A decode node that is short of pages, beside a prefill node that is idle for about half of the time."""
    schedule = ScheduleOptions(prefill_ahead_share=share, max_running_requests=256)
    shape = FleetShape(
        prefill=NodeShape(pool_tokens=TRACE_POOL_TOKENS, schedule=schedule),
        decode=NodeShape(pool_tokens=FULL_DECODE_POOL_TOKENS, schedule=schedule),
    )
    fleet = SimFleet(shape, MIX_COSTS)
    fleet.submit(
        unrelated(random.Random(0), FULL_REQUESTS, gap_s=gap_s, input_lens=[1024, 2048], output_len=96)
    )
    fleet.run()
    return {
        "bench": "prefill_ahead",
        "prefill_ahead_share": share,
        "gap_s": gap_s,
        **totals(fleet),
        "prefill_busy": round(fleet.nodes["p0000"].stream.busy_s / fleet.loop.now, 2),
    }


def totals(fleet: SimFleet) -> dict[str, Any]:
    """What a workload came to."""
    ttfts = sorted(outcome.ttft_s for outcome in fleet.outcomes.values() if outcome.ok)
    vitals = [node.vitals for node in fleet.nodes.values() if node.role is Role.PREFILL]
    return {
        "requests": len(fleet.outcomes),
        "ok": len(ttfts),
        "hit_ratio": round(
            sum(v.num_cached_tokens for v in vitals) / sum(v.num_prompt_tokens for v in vitals), 4
        ),
        "ttft_mean_s": round(sum(ttfts) / len(ttfts), 3),
        "ttft_p50_s": round(percentile(ttfts, 50), 3),
        "ttft_p99_s": round(percentile(ttfts, 99), 3),
        "virtual_s": round(fleet.loop.now, 1),
    }


def main() -> Iterator[dict[str, Any]]:
    """Every policy on both workloads, the mix of short and long prompts, and the full decode node."""
    costs = load_cost_model()
    for workload in (MOONCAKE, "few_shot"):
        for policy in POLICIES:
            yield run_policy(workload, policy, costs)
    for share in (0.0, 0.25, 0.5):
        yield run_mix(share)
    for gap_s in FULL_GAPS_S:
        for share in (0.0, 0.25):
            yield run_full(share, gap_s)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The best policy on each workload, by hit ratio, against `fcfs`."""
    best: dict[str, Any] = {}
    for row in rows:
        if row["bench"] == "short_prompts":
            best[f"short_ttft_p99_s_with_share_{row['short_prompt_share']}"] = row["short_ttft_p99_s"]
            continue
        if row["bench"] == "prefill_ahead":
            best[f"full_ttft_p99_s_at_{row['gap_s']}_s_ahead_{row['prefill_ahead_share']}"] = row[
                "ttft_p99_s"
            ]
            continue
        name = row["workload"]
        if row["policy"] == "fcfs":
            best[f"{name}_fcfs_hit_ratio"] = row["hit_ratio"]
        if row["hit_ratio"] > best.get(f"{name}_best_hit_ratio", 0):
            best |= {f"{name}_best_hit_ratio": row["hit_ratio"], f"{name}_best_policy": row["policy"]}
    return best
