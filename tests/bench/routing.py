"""Which routing policy, and what does it cost to split conversations? 2P2D, simulated and for real.

    policies    each policy on both fleets, over parts of the recorded conversations and few-shot prompts. `before` is
                round robin among prefill nodes, with prefixes counted on decode nodes only
    fleet       `ttft` over 1,000 simulated nodes of which some die and some join, with API keys
    real        parts of both recorded traces through real processes over nodes whose forwards are a wait, beside
                what the simulator predicts for them
    turns       conversations of several turns over such nodes: prompt tokens computed against new ones

`good_share` is the share of the requests that meet `planner.SLO`. Forwards cost what `planner.COSTS` says, and in the
large fleet what profile.json says. A figure `of ttft` is divided by that of `ttft`, part by part or round by round.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.candidate import Candidate
from planner.figures import Figures, arrival_seconds, figures_of
from planner.simulator.fleet import FleetShape, SimFleet
from planner.simulator.node import NodeShape
from planner.traffic.trace import SimRequest
from router.dispatch.policy import POLICIES, ttft
from shared.config import ScheduleOptions
from shared.protocol.messages import Role
from tests.bench.fitted import load_cost_model
from tests.bench.planner import (
    COSTS,
    NODES,
    SLO,
    Added,
    Part,
    azure,
    fit,
    fresh_fleet,
    measure,
    mooncake,
    predict,
    profile,
    timed_profile,
)
from tests.bench.recorded import load_trace, scaled
from tests.bench.servers import new_client, prompt_ids, stream
from tests.bench.stats import figure, percentile, ratios, significant
from tests.bench.table import Row
from tests.bench.timed_stream import VOCAB_SIZE
from tests.sim.workloads import few_shot

WORKLOADS = ("conversations", "few-shot prompts")
PARTS = 5
"""Of each workload in the simulator. Conversations keep two prefill nodes busy for two thirds of the time."""
LARGE = {"nodes": 1000, "requests": 4000, "rate": 400.0}
NAMES = ("before", *POLICIES)
NUM_API_KEYS = 8
NUM_DEATHS = 40
REAL_PARTS = (mooncake(2.2, 1200), azure(2.0, 1200))
"""Two prefill nodes of `planner.COSTS` are then busy for about half of the time."""
ROUNDS = 3
"""Of turns."""
CONVERSATIONS, TURNS, FIRST_TOKENS = 6, 5, 400
TALKS = {"short answers": (48, 40), "long answers": (100, 200)}
"""Tokens of each later turn, and of each answer."""


def workload(name: str, part: int) -> Sequence[SimRequest]:
    """The requests of one simulated run: about 1,000 or 1,500."""
    if name == "few-shot prompts":
        return few_shot(random.Random(part), 1500, gap_s=0.02)
    return replace(mooncake(2.6, 350.0 * part), replayed_s=120.0).requests(NODES.context_length)


def run_policies(name: str) -> Iterator[dict[str, Any]]:
    """Every policy on a simulated 2P2D."""
    nodes = profile(NODES, COSTS, Added())
    parts = [workload(name, part) for part in range(PARTS)]
    runs = {policy: [predict(candidate(policy), part, nodes) for part in parts] for policy in NAMES}
    values = {policy: [values_of(run.figures, run.cached_share) for run in of] for policy, of in runs.items()}
    for policy, of in values.items():
        yield {"bench": "policies", "workload": name, "policy": policy, **compared(of, values["ttft"])}


def values_of(of: Figures, cached_share: float) -> dict[str, float]:
    """What is compared, of one run."""
    return {
        "ttft_mean_ms": 1e3 * of.ttft_s.mean,
        "ttft_p99_ms": 1e3 * of.ttft_s.p99,
        "itl_mean_ms": 1e3 * of.itl_s.mean,
        "itl_p99_ms": 1e3 * of.itl_s.p99,
        "cached_share": cached_share,
        "good_share": of.good_share,
    }


def compared(of: Sequence[Mapping[str, float]], default: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The medians and spreads of several runs, and of their ratios to those of the default policy."""
    row: dict[str, Any] = {}
    for name in of[0]:
        values, others = [one[name] for one in of], [one[name] for one in default]
        row |= figure(name, values)
        if of is not default and all(others):
            row |= figure(f"{name} of ttft", ratios(values, others))
    return row


def run_large() -> dict[str, Any]:
    """A thousand nodes, of which some die and are replaced. Each request is refused, or ends once with all tokens."""
    rng = random.Random(0)
    rows = load_trace()
    half = LARGE["nodes"] // 2
    shape: dict[str, Any] = {
        "num_prefill": half,
        "num_decode": half,
        "local_prefill_tokens": None,
        "prefill_policy": ttft,
        "decode_policy": ttft,
    }
    recorded = itertools.islice(scaled(rows, rate=LARGE["rate"]), int(LARGE["requests"]))
    requests = (replace(request, api_key=i % NUM_API_KEYS) for i, request in enumerate(recorded))
    node = NodeShape(pool_tokens=65_536, schedule=ScheduleOptions(max_running_requests=256))
    fleet = SimFleet(FleetShape(prefill=node, decode=node, **shape), load_cost_model())
    fleet.submit(requests)
    end = rows[int(LARGE["requests"]) - 1].at_s / LARGE["rate"]
    for i in range(NUM_DEATHS):
        fleet.run(until=end * (i + 1) / NUM_DEATHS)
        role = (Role.PREFILL, Role.DECODE)[i % 2]
        fleet.kill(rng.choice([name for name, node in fleet.nodes.items() if node.role is role]))
        fleet.start(f"{role[0]}-new-{i}", role)
    fleet.run()
    assert all(outcome.num_ends == 1 and outcome.ok for outcome in fleet.outcomes.values())
    assert len(fleet.outcomes) + fleet.num_refused == LARGE["requests"]
    taken = sorted(len(node.rids) for node in fleet.nodes.values() if node.role is Role.PREFILL)
    return {
        "bench": "fleet",
        "nodes": LARGE["nodes"],
        "died": NUM_DEATHS,
        "refused": fleet.num_refused,
        "most_requests_of_a_prefill_node": taken[-1],
        "median_requests": taken[len(taken) // 2],
        "ttft_mean_ms": round(1e3 * statistics.mean(one.ttft_s for one in fleet.outcomes.values())),
    }


def run_real(part: Part, added: Added) -> Iterator[dict[str, Any]]:
    """A part of a trace through real processes under each policy, in both orders, beside what is predicted."""
    requests = part.requests(NODES.context_length)
    seconds = arrival_seconds([request.at_s for request in requests])
    rounds: dict[str, list[dict[str, float]]] = {policy: [] for policy in NAMES}
    for order in (NAMES, NAMES[::-1]):
        for policy in order:
            seen = measure(candidate(policy), requests)
            served = figures_of(list(seen.served.values()), len(seen.failed), seconds, SLO)
            rounds[policy].append(values_of(served, seen.cached_share))
    nodes = timed_profile(NODES, added)
    for policy, both in rounds.items():
        run = predict(candidate(policy), requests, nodes)
        predicted = values_of(run.figures, run.cached_share)
        yield {
            "bench": "real",
            "workload": part.name,
            "policy": policy,
            "requests": len(requests),
            **compared(both, rounds["ttft"]),
            **{f"{name} predicted": significant(value) for name, value in predicted.items()},
        }


def candidate(policy: str) -> Candidate:
    """2P2D with one policy on both fleets, or as it was before there was a choice."""
    if policy == "before":
        return Candidate(
            num_prefill=2,
            num_decode=2,
            prefill_policy="round-robin",
            decode_policy="cache-aware",
            local_prefill_tokens=16,
        )
    return Candidate(num_prefill=2, num_decode=2, prefill_policy=policy, decode_policy=policy)


async def converse(url: str, talk: str, seed: int) -> tuple[int, int, list[float]]:
    """One conversation: its new tokens, the prompt tokens that were computed, and the TTFT of each later turn."""
    rng = random.Random(seed)
    turn_tokens, answer_tokens = TALKS[talk]
    ids: list[int] = []
    num_new = num_computed = 0
    later: list[float] = []
    async with new_client() as client:
        for turn in range(TURNS):
            said = prompt_ids(rng, turn_tokens if turn else FIRST_TOKENS, VOCAB_SIZE)
            ids += said
            seen = await stream(client, url, ids, answer_tokens)
            num_new += len(said)
            num_computed += len(ids) - seen.meta["cached_tokens"]
            later += [seen.ttft_s] if turn else []
            ids += seen.output_ids
    return num_new, num_computed, later


def run_turns(policy: str, talk: str) -> dict[str, Any]:
    """Conversations side by side, each waiting for its answers, on fresh fleets that have had others before."""
    rounds = [_turns(policy, talk) for _ in range(ROUNDS)]
    names = ("computed_to_new", "later_ttft_p50_ms", "later_ttft_p99_ms")
    row: dict[str, Any] = {"bench": "turns", "workload": talk, "policy": policy}
    for name, of in zip(names, zip(*rounds, strict=True), strict=True):
        row |= figure(name, of)
    return row


def _turns(policy: str, talk: str) -> tuple[float, float, float]:
    async def all_of_them(url: str, first: int) -> list[tuple[int, int, list[float]]]:
        seeds = range(first, first + CONVERSATIONS)
        return await asyncio.gather(*(converse(url, talk, seed) for seed in seeds))

    with fresh_fleet(candidate(policy)) as fleet:
        url = f"http://127.0.0.1:{fleet.router.port}"
        asyncio.run(all_of_them(url, CONVERSATIONS))
        talks = asyncio.run(all_of_them(url, 0))
        fleet.stop()
    later = sorted(seconds for _, _, ttfts in talks for seconds in ttfts)
    computed_to_new = sum(computed for _, computed, _ in talks) / sum(new for new, _, _ in talks)
    return computed_to_new, 1e3 * percentile(later, 50), 1e3 * percentile(later, 99)


def main() -> Iterator[dict[str, Any]]:
    """A row for each policy and workload."""
    for name in WORKLOADS:
        yield from run_policies(name)
    yield run_large()
    added = fit()
    for part in REAL_PARTS:
        yield from run_real(part, added)
    for talk in TALKS:
        for policy in ("before", "ttft"):
            yield run_turns(policy, talk)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The default against what was before it."""
    figures: dict[str, Any] = {}
    for row in rows:
        if row.get("policy") in ("before", "ttft"):
            of = f"{row.get('workload', row['bench'])} {row['policy']}"
            names = ("ttft_mean_ms", "ttft_p99_ms", "good_share", "computed_to_new", "later_ttft_p50_ms")
            figures |= {f"{of} {name}": row[name] for name in names if name in row}
    return figures
