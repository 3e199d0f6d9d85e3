"""How far are the planner's predictions from what is measured? Parts of recorded traces on real fleets.

    fit      one node of each role, with no load and with some: what a scheduler, the router and a transfer add
    timed    real processes over nodes whose forwards are a wait of the cost model (`timed_node`)

Each part is replayed in ROUNDS fresh fleets, and predicted by `planner.simulate` with the same costs. No part that is
used for fitting is used for the error. `differ` is how far the rounds are from each other: (most - least) / mean, and
`error` is predicted / mean - 1. A figure with a bound hits if its error is within the bound or within `differ`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.figures import Figures, Slo, arrival_seconds, figures_of
from planner.profile import Measured, NodeKind, Profile, RouterCost, TransferCost
from planner.simulate import Run, simulate
from planner.traffic.trace import SimRequest, scaled
from tests.bench.recorded import AZURE, MOONCAKE, load_trace
from tests.bench.replay import Replayed, replay
from tests.bench.stats import significant
from tests.bench.table import Row
from tests.bench.timed_node import TimedNodes, timed_fleet
from tests.bench.timed_stream import VOCAB_SIZE
from tests.processes import Fleet

ROUNDS = 2
SLO = Slo(ttft_s=0.5, itl_s=0.05)
COSTS = CostModel(a=0.008, b=1e-4, c=1e-9, d=0.02, e=5e-4, f=5e-7)
"""A node that prefills 8,500 tokens a second and decodes 16 sequences at 35 tokens a second each."""
NODES = TimedNodes(costs=COSTS)

BOUNDS = {"goodput": 0.1, "ttft_mean_ms": 0.1, "ttft_p99_ms": 0.25, "itl_p99_ms": 0.25}
"""Of the relative error."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What arrives within `replayed_s` from `start_s` of a trace on, `rate` times as fast as it was recorded.

    Lengths are divided by `scale`.
    """

    trace: str
    scale: int
    rate: float
    start_s: float
    replayed_s: float = 40.0

    def requests(self, context_length: int) -> list[SimRequest]:
        """Those that fit into the context. Time 0 is the start of the part."""
        end_s = self.start_s + self.replayed_s * self.rate
        rows = [
            replace(row, at_s=row.at_s - self.start_s) for row in load_trace(self.trace) if row.at_s < end_s
        ]
        return [
            replace(request, max_new_tokens=request.output_len)
            for request in scaled(rows, scale=self.scale, rate=self.rate)
            if request.at_s >= 0 and request.input_len + request.output_len <= context_length
        ]

    @property
    def name(self) -> str:
        """mooncake from 600 s."""
        return f"{self.trace.split('_')[0]} from {self.start_s:g} s"


FIT = Part(trace=AZURE, scale=2, rate=1.0, start_s=0.0, replayed_s=20.0)


def mooncake(rate: float, start_s: float) -> Part:
    """Conversations with long prompts, which share prefixes."""
    return Part(trace=MOONCAKE, scale=8, rate=rate, start_s=start_s)


def azure(rate: float, start_s: float) -> Part:
    """Short prompts that share nothing, and more output."""
    return Part(trace=AZURE, scale=2, rate=rate, start_s=start_s)


def split(num_prefill: int, num_decode: int) -> Candidate:
    """xPyD with every default."""
    return Candidate(num_prefill=num_prefill, num_decode=num_decode)


def together(num_nodes: int, *, mixed: bool = False) -> Candidate:
    """Nodes that do both."""
    return Candidate(num_prefill=0, num_decode=num_nodes, enable_mixed_chunk=mixed)


CASES: tuple[tuple[Candidate, Part], ...] = (
    (split(1, 1), mooncake(0.5, 600)),
    (split(1, 1), azure(1.0, 600)),
    (split(1, 1), azure(1.5, 900)),
    (split(2, 1), mooncake(1.5, 900)),
    (split(1, 2), azure(2.0, 1200)),
    (split(2, 2), mooncake(1.5, 1200)),
    (split(2, 2), azure(2.5, 700)),
    (split(3, 3), mooncake(2.0, 600)),
    (split(3, 3), mooncake(3.0, 1000)),
    (split(3, 3), azure(4.0, 900)),
    (together(2), mooncake(1.0, 600)),
    (together(2), azure(1.5, 600)),
    (together(3, mixed=True), azure(2.5, 1000)),
)


# ---------------------------------------------------------------------------------------------- measured
def measure(candidate: Candidate, requests: Sequence[SimRequest], nodes: TimedNodes = NODES) -> Replayed:
    """One replay in a fresh fleet."""
    with _timed(candidate, nodes) as fleet:
        return replay(fleet.router.port, requests, _family(fleet), VOCAB_SIZE)


@contextmanager
def _timed(candidate: Candidate, nodes: TimedNodes) -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        timed_fleet(nodes, candidate, Path(folder)) as fleet,
    ):
        yield fleet
        fleet.stop()


def _family(fleet: Fleet) -> list[psutil.Process]:
    return [process for one in fleet.processes for process in one.family()]


# ------------------------------------------------------------------------------------------------- fitted
@dataclass(frozen=True, kw_only=True)
class Added:
    """What comes on top of forwards, in seconds."""

    step_s: float = 0.0
    transfer_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0


def fit(nodes: TimedNodes = NODES) -> Added:
    """Measure 1P1D: the router's CPU time under load, and what lone requests wait for beyond their forwards."""
    requests = FIT.requests(nodes.context_length)
    short = [replace(request, output_len=2, max_new_tokens=2) for request in requests]
    lone = [
        replace(one, at_s=4.0 * i, output_len=16, max_new_tokens=16) for i, one in enumerate(requests[:12])
    ]
    candidate = split(1, 1)
    cpu_s: list[float] = []
    with _timed(candidate, nodes) as fleet:
        for load in (requests, short):
            router = fleet.router.family()
            before_s = sum(sum(process.cpu_times()[:2]) for process in router)
            assert not replay(fleet.router.port, load, (), VOCAB_SIZE).failed
            cpu_s.append(sum(sum(process.cpu_times()[:2]) for process in router) - before_s)
    num_tokens = sum(request.output_len - 2 for request in requests)
    token_s = (cpu_s[0] - cpu_s[1]) / num_tokens
    added = Added(token_s=token_s, request_s=cpu_s[1] / len(short) - 2 * token_s)
    seen = measure(candidate, lone, nodes)
    measured = figures_of(seen.served, len(seen.failed), arrival_seconds([one.at_s for one in lone]), SLO)
    predicted = predict(candidate, lone, profile(nodes, added))
    return replace(
        added,
        step_s=max(measured.ttft_s.mean - predicted.figures.ttft_s.mean, 0.0),
        transfer_s=max(15 * (measured.itl_s.mean - predicted.figures.itl_s.mean), 0.0),
    )


def profile(nodes: TimedNodes, added: Added) -> Profile:
    """What the planner is told of these nodes."""
    return Profile(
        measured=Measured(at="", machine="timed nodes", model="none", versions={}),
        node=NodeKind(
            pool_tokens=nodes.pool_tokens,
            page_size=nodes.page_size,
            context_length=nodes.context_length,
            max_running_requests=nodes.max_running_requests,
            chunked_prefill_size=nodes.chunked_prefill_size,
            kv_bytes_per_token=nodes.kv_bytes_per_token,
            start_s=0.0,
        ),
        forward=replace(nodes.costs, step_s=added.step_s),
        transfer=TransferCost(latency_s=added.transfer_s, bytes_s=1e9),
        router=RouterCost(request_s=added.request_s, token_s=added.token_s),
    )


def predict(candidate: Candidate, requests: Sequence[SimRequest], nodes: Profile) -> Run:
    """The planner's answer."""
    return simulate(candidate, requests, prefill=nodes, decode=nodes, slo=SLO)


# --------------------------------------------------------------------------------------------------- rows
def main() -> Iterator[dict[str, Any]]:
    """What was fitted, then a row for each case, those that miss first."""
    added = fit()
    yield {"bench": "fit", **{f"{name[:-2]}_us": round(1e6 * s) for name, s in asdict(added).items()}}
    yield from sorted((measured_row(candidate, part, added) for candidate, part in CASES), key=order)


def measured_row(candidate: Candidate, part: Part, added: Added) -> dict[str, Any]:
    """Replay one case ROUNDS times, and predict it."""
    requests = part.requests(NODES.context_length)
    rounds = [measure(candidate, requests) for _ in range(ROUNDS)]
    return row(candidate, part, requests, rounds, predict(candidate, requests, profile(NODES, added)))


def row(
    candidate: Candidate,
    part: Part,
    requests: Sequence[SimRequest],
    rounds: Sequence[Replayed],
    predicted: Run,
) -> dict[str, Any]:
    """One case: of each figure the prediction, the mean of the rounds, the error, and how far the rounds differ."""
    seconds = arrival_seconds([request.at_s for request in requests])
    measured = [
        figures(figures_of(list(seen.served.values()), len(seen.failed), seconds, SLO), seen.cached_share)
        for seen in rounds
    ]
    return {
        "bench": "error",
        "fleet": candidate.name,
        "part": part.name,
        "rate": part.rate,
        "requests": len(requests),
        "cpu_share": round(max(seen.cpu_share for seen in rounds), 2),
        "late_ms": round(1e3 * max(seen.late_s for seen in rounds), 1),
        "load": round(os.getloadavg()[0], 1),
        **compared(figures(predicted.figures, predicted.cached_share), measured),
    }


def figures(of: Figures, cached_share: float) -> dict[str, float]:
    """What is compared."""
    ms = {"ttft": of.ttft_s, "itl": of.itl_s}
    return {
        "goodput": of.goodput,
        **{
            f"{name}_{which}_ms": 1e3 * getattr(times, which)
            for name, times in ms.items()
            for which in ("mean", "p50", "p99")
        },
        "cached_share": cached_share,
    }


def compared(predicted: Mapping[str, float], measured: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Each figure, and which of those with a bound miss it."""
    cells: dict[str, Any] = {}
    missed = []
    for name, value in predicted.items():
        rounds = [one[name] for one in measured]
        mean = statistics.mean(rounds)
        error = relative(value - mean, mean)
        differ = relative(max(rounds) - min(rounds), mean)
        cells |= {
            f"{name}_predicted": significant(value),
            name: significant(mean),
            f"{name}_error": round(error, 3),
            f"{name}_differ": round(differ, 3),
        }
        if name in BOUNDS and abs(error) > max(BOUNDS[name], differ):
            missed.append(name)
    return {"hit": not missed, "missed": ", ".join(missed), **cells}


def relative(difference: float, of: float) -> float:
    """As a share; of nothing, no difference is none and any other is all."""
    if of == 0:
        return 0.0 if difference == 0 else 1.0
    return difference / of


def order(row: Row) -> tuple[int, float]:
    """Misses first, the farthest first."""
    beyond = [abs(row[f"{name}_error"]) / max(bound, row[f"{name}_differ"]) for name, bound in BOUNDS.items()]
    return int(row["hit"]), -max(beyond)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How many cases hit, and the middle and the largest error of each bounded figure."""
    cases = [row for row in rows if row["bench"] == "error"]
    errors = {name: sorted(abs(row[f"{name}_error"]) for row in cases) for name in BOUNDS}
    return {
        "cases": len(cases),
        "hits": sum(row["hit"] for row in cases),
        **{f"{name}_median_error": round(statistics.median(values), 3) for name, values in errors.items()},
        **{f"{name}_largest_error": values[-1] for name, values in errors.items()},
        "largest_cpu_share": max(row["cpu_share"] for row in cases),
    }
