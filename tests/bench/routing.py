"""Which routing policy, and what does it cost to split conversations? 2P2D, simulated and for real.

    policies    each policy on both fleets, over the recorded conversations and few-shot prompts. `before` is round
                robin among prefill nodes, with prefixes counted on decode nodes only
    fleet       `ttft` over 1,000 simulated nodes of which some die and some join, with API keys and --ttft-limit-s
    real        parts of both recorded traces through real processes over nodes whose forwards are a wait, beside
                what the simulator predicts for them
    turns       conversations of several turns: prompt tokens computed against new ones

`goodput` is the share of the requests with a TTFT and a mean time between tokens within TTFT_S and TPOT_S. Simulated
times are virtual seconds of the costs in profile.json.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.candidate import Candidate
from planner.figures import arrival_seconds, figures_of
from planner.simulator.fleet import FleetShape, Outcome, SimFleet
from planner.simulator.node import NodeShape
from planner.traffic.trace import SimRequest, scaled
from router.dispatch.policy import POLICIES, cache_aware, round_robin, ttft
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
    measure,
    mooncake,
    predict,
    profile,
)
from tests.bench.recorded import MOONCAKE, load_trace
from tests.bench.replay import Replayed
from tests.bench.servers import new_client, prompt_ids, servers, stream
from tests.bench.stats import figure, percentile
from tests.bench.table import Row
from tests.bench.timed_stream import VOCAB_SIZE
from tests.bench.trace_serving import TPOT_S, TTFT_S
from tests.sim.workloads import few_shot

RATES = {MOONCAKE: 4.0, "few_shot": 2.0}
"""Times the trace's own rate, or 0.06 s: two prefill nodes are then busy for two thirds of the time."""
NUM_REQUESTS = 1500
BEFORE = {"prefill_policy": round_robin, "decode_policy": cache_aware, "local_prefill_tokens": 16}
LARGE = {"nodes": 1000, "requests": 4000, "rate": 400.0}
NUM_API_KEYS, TTFT_LIMIT_S = 8, 0.1
NUM_DEATHS = 40
REAL_PARTS = (mooncake(2.2, 1200), azure(2.0, 1200))
"""Two prefill nodes of `planner.COSTS` are then busy for about half of the time."""
CONVERSATIONS, TURNS, FIRST_TOKENS = 6, 5, 400
TALKS = {"short answers": (48, 40), "long answers": (100, 200)}
"""Tokens of each later turn, and of each answer."""


def simulated(shape: dict[str, Any], requests: Iterable[SimRequest], seed: int = 0) -> SimFleet:
    """A fleet before its first request. `shape` has the fields of FleetShape that are not the usual ones."""
    node = NodeShape(pool_tokens=65_536, schedule=ScheduleOptions(max_running_requests=256))
    fleet = SimFleet(FleetShape(**{"prefill": node, "decode": node, **shape}), load_cost_model(), seed=seed)
    fleet.submit(requests)
    return fleet


def workload(name: str) -> Iterable[SimRequest]:
    """The requests of one simulated run."""
    if name == "few_shot":
        return few_shot(random.Random(0), NUM_REQUESTS, gap_s=0.06 / RATES[name])
    return itertools.islice(scaled(load_trace(name), rate=RATES[name]), NUM_REQUESTS)


def run_policy(name: str, policy: str) -> dict[str, Any]:
    """One policy on 2P2D."""
    both = POLICIES.get(policy, ttft)
    chosen = {"prefill_policy": both, "decode_policy": both, "local_prefill_tokens": None}
    shape = {"num_prefill": 2, "num_decode": 2, **(BEFORE if policy == "before" else chosen)}
    fleet = simulated(shape, workload(name))
    fleet.run()
    return {"bench": "policies", "workload": name, "policy": policy, **totals(fleet)}


def totals(fleet: SimFleet) -> dict[str, Any]:
    """What a simulated workload came to."""
    done = [outcome for outcome in fleet.outcomes.values() if outcome.ok]
    first = sorted(outcome.ttft_s for outcome in done)
    gaps = sorted(map(_tpot_s, done))
    good = sum(outcome.ttft_s <= TTFT_S and _tpot_s(outcome) <= TPOT_S for outcome in done)
    vitals = [node.vitals for node in fleet.nodes.values()]
    computed = sum(one.num_prompt_tokens - one.num_cached_tokens for one in vitals)
    return {
        "requests": len(fleet.outcomes),
        "ok": len(done),
        "ttft_mean_ms": round(1e3 * sum(first) / len(first)),
        "ttft_p99_ms": round(1e3 * percentile(first, 99)),
        "tpot_mean_ms": round(1e3 * sum(gaps) / len(gaps), 1),
        "tpot_p99_ms": round(1e3 * percentile(gaps, 99), 1),
        "cached_share": round(1 - computed / sum(outcome.request.input_len for outcome in done), 3),
        "goodput": round(good / len(done), 3),
    }


def _tpot_s(outcome: Outcome) -> float:
    assert outcome.ended_at is not None and outcome.first_token_at is not None
    return (outcome.ended_at - outcome.first_token_at) / max(outcome.num_tokens - 1, 1)


def run_large() -> dict[str, Any]:
    """A thousand nodes, of which some die and are replaced. Each request is refused, or ends once with all tokens."""
    rng = random.Random(0)
    rows = load_trace()
    half = LARGE["nodes"] // 2
    shape = {
        "num_prefill": half,
        "num_decode": half,
        "local_prefill_tokens": None,
        "ttft_limit_s": TTFT_LIMIT_S,
    }
    recorded = itertools.islice(scaled(rows, rate=LARGE["rate"]), int(LARGE["requests"]))
    requests = (replace(request, api_key=i % NUM_API_KEYS) for i, request in enumerate(recorded))
    fleet = simulated({**shape, "prefill_policy": ttft, "decode_policy": ttft}, requests)
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
        **totals(fleet),
    }


def run_real(part: Part, added: Added) -> Iterator[dict[str, Any]]:
    """A part of a trace through real processes under each policy, in both orders, beside what is predicted."""
    requests = part.requests(NODES.context_length)
    seconds = arrival_seconds([request.at_s for request in requests])
    rounds: dict[str, list[Replayed]] = {policy: [] for policy in ("before", *POLICIES)}
    for order in (list(rounds), list(rounds)[::-1]):
        for policy in order:
            rounds[policy].append(measure(candidate(policy), requests))
    for policy, both in rounds.items():
        seen = [figures_of(list(one.served.values()), len(one.failed), seconds, SLO) for one in both]
        run = predict(candidate(policy), requests, profile(NODES, COSTS, added))
        yield {
            "bench": "real",
            "workload": part.name,
            "policy": policy,
            "requests": len(requests),
            **figure("ttft_mean_ms", [1e3 * one.ttft_s.mean for one in seen]),
            "ttft_mean_ms_predicted": round(1e3 * run.figures.ttft_s.mean),
            **figure("ttft_p99_ms", [1e3 * one.ttft_s.p99 for one in seen]),
            "ttft_p99_ms_predicted": round(1e3 * run.figures.ttft_s.p99),
            **figure("itl_mean_ms", [1e3 * one.itl_s.mean for one in seen]),
            **figure("itl_p99_ms", [1e3 * one.itl_s.p99 for one in seen]),
            "itl_p99_ms_predicted": round(1e3 * run.figures.itl_s.p99, 1),
            **figure("cached_share", [one.cached_share for one in both]),
            "cached_share_predicted": round(run.cached_share, 3),
            **figure("good_share", [one.good_share for one in seen]),
            "good_share_predicted": round(run.figures.good_share, 3),
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


def real_flags(policy: str) -> list[str]:
    """Of a router with 2P2D."""
    if policy == "before":
        chosen = ["round-robin", "cache-aware", "16"]
    else:
        chosen = [policy, policy, "auto"]
    names = ("--prefill-policy", "--decode-policy", "--local-prefill-tokens")
    return ["--local", "2P2D", *itertools.chain.from_iterable(zip(names, chosen, strict=True))]


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
    """Conversations side by side, each waiting for its answers, on a fleet that has had others before."""

    async def all_of_them(url: str, first: int) -> list[tuple[int, int, list[float]]]:
        seeds = range(first, first + CONVERSATIONS)
        return await asyncio.gather(*(converse(url, talk, seed) for seed in seeds))

    with servers({policy: real_flags(policy)}) as urls:
        asyncio.run(all_of_them(urls[policy], CONVERSATIONS))
        talks = asyncio.run(all_of_them(urls[policy], 0))
    later = sorted(seconds for _, _, ttfts in talks for seconds in ttfts)
    return {
        "bench": "turns",
        "workload": talk,
        "policy": policy,
        "computed_to_new": round(sum(c for _, c, _ in talks) / sum(n for n, _, _ in talks), 3),
        "later_ttft_p50_ms": round(1e3 * percentile(later, 50)),
        "later_ttft_p99_ms": round(1e3 * percentile(later, 99)),
    }


def main() -> Iterator[dict[str, Any]]:
    """A row for each policy and workload."""
    for name in RATES:
        for policy in ("before", *POLICIES):
            yield run_policy(name, policy)
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
            names = ("ttft_mean_ms", "ttft_p99_ms", "goodput", "computed_to_new", "later_ttft_p50_ms")
            figures |= {f"{of} {name}": row[name] for name in names if name in row}
    return figures
