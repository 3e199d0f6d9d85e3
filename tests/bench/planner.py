"""How far are the planner's predictions from what is measured? Parts of recorded traces on real fleets.

    fit      one node of each role, with no load and with some: what a scheduler, the router and a transfer add
    timed    real processes over nodes whose forwards are a wait of the cost model (`timed_node`)
    others   a model with real kernels on the cores of this machine (`real_fleet`), by forwards that were timed before

Each part is replayed in ROUNDS fresh fleets, and predicted by `planner.simulate` with the same costs. No part that is
used for fitting is used for the error. `differ` is how far the rounds are from each other: (most - least) / mean, and
`error` is predicted / mean - 1. A figure with a bound hits if its error is within the bound or within `differ`.
"""

from __future__ import annotations

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
from planner.figures import Slo, arrival_seconds
from planner.profile import Measured, NodeKind, Profile, RouterCost, TransferCost
from planner.simulate import Run, simulate
from planner.traffic.trace import SimRequest
from tests.bench.figures import Figures, figures_of, figures_of_run
from tests.bench.real_fleet import BUILTIN, LLAMA, RealNodes, real_fleet
from tests.bench.recorded import AZURE, MOONCAKE, load_trace, scaled
from tests.bench.replay import Replayed, replay
from tests.bench.stats import significant
from tests.bench.table import Row
from tests.bench.timed_node import TimedNode, TimedNodes, timed_fleet
from tests.bench.timed_stream import SPIN_S, VOCAB_SIZE
from tests.processes import Fleet, Process

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


FIT = Part(trace=AZURE, scale=2, rate=3.0, start_s=0.0, replayed_s=20.0)


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


def quarter(rate: float, start_s: float) -> Part:
    """Azure's conversations for the context of the built-in model."""
    return Part(trace=AZURE, scale=4, rate=rate, start_s=start_s)


def eighth(rate: float, start_s: float) -> Part:
    """The same for a model whose kernels take this machine longer."""
    return Part(trace=AZURE, scale=8, rate=rate, start_s=start_s)


REAL_CASES: tuple[tuple[RealNodes, Candidate, Part], ...] = (
    (BUILTIN, together(1), quarter(2.0, 600)),
    (BUILTIN, split(1, 1), quarter(2.0, 600)),
    (LLAMA, together(1), eighth(0.3, 800)),
    (LLAMA, split(1, 1), eighth(0.3, 800)),
    (replace(BUILTIN, half_is_free=True), together(1), quarter(2.0, 600)),
    (replace(LLAMA, half_is_free=True), together(1), eighth(0.2, 800)),
)


# ---------------------------------------------------------------------------------------------- measured
def measure_real(nodes: RealNodes, candidate: Candidate, requests: Sequence[SimRequest]) -> Replayed:
    """One replay with real kernels."""
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        real_fleet(nodes, candidate, Path(folder)) as router,
    ):
        return replay(router.port, requests, router.family(), nodes.vocab_size)


def measure(candidate: Candidate, requests: Sequence[SimRequest], nodes: TimedNodes = NODES) -> Replayed:
    """One replay in a fresh fleet."""
    with fresh_fleet(candidate, nodes) as fleet:
        seen = replay(fleet.router.port, requests, _family(fleet), VOCAB_SIZE)
        fleet.stop()
        return seen


@contextmanager
def fresh_fleet(candidate: Candidate, nodes: TimedNodes = NODES) -> Iterator[Fleet]:
    """A router before timed nodes, ready to serve. The caller stops it, if all went well."""
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        timed_fleet(nodes, candidate, Path(folder)) as fleet,
    ):
        yield fleet


def _family(fleet: Fleet) -> list[psutil.Process]:
    return [process for one in fleet.processes for process in one.family()]


# ------------------------------------------------------------------------------------------------- fitted
@dataclass(frozen=True, kw_only=True)
class Added:
    """What comes on top of forwards, in seconds."""

    step_s: float = 0.0
    message_s: float = 2e-4
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
    router_s: list[float] = []
    with fresh_fleet(candidate, nodes) as fleet:
        started_s = sum(_thread_cpu_s(node)[node.pid, node.pid] for node in fleet.nodes.values())
        for load in (requests, short):
            before = _thread_cpu_s(fleet.router)
            assert not replay(fleet.router.port, load, (), VOCAB_SIZE).failed
            # One thread serves, and it is the busiest.
            router_s.append(max(s - before.get(key, 0.0) for key, s in _thread_cpu_s(fleet.router).items()))
        scheduler_s = sum(_thread_cpu_s(node)[node.pid, node.pid] for node in fleet.nodes.values())
        scheduler_s -= started_s
        fleet.stop()
        num_forwards = sum(node.forwards[0] for node in fleet.nodes.values() if isinstance(node, TimedNode))
    token_s = (router_s[0] - router_s[1]) / sum(request.output_len - 2 for request in requests)
    added = Added(
        step_s=scheduler_s / num_forwards - SPIN_S,
        message_s=0.0,
        token_s=token_s,
        request_s=router_s[1] / len(short) - 2 * token_s,
    )
    measured = _figures(lone, measure(candidate, lone, nodes))

    def predicted(added: Added) -> Figures:
        return figures_of_run(predict(candidate, lone, timed_profile(nodes, added)), lone, SLO)

    without, with_ms = predicted(added), predicted(replace(added, message_s=1e-3))
    messages = (with_ms.ttft_s.mean - without.ttft_s.mean) / 1e-3
    added = replace(added, message_s=max(measured.ttft_s.mean - without.ttft_s.mean, 0.0) / messages)
    gaps = lone[0].output_len - 1
    late_s = gaps * (measured.itl_s.mean - predicted(added).itl_s.mean)
    return replace(added, transfer_s=max(late_s, 0.0))


def _thread_cpu_s(process: Process) -> dict[tuple[int, int], float]:
    """CPU seconds so far of each thread of a process and of its children, by process and thread."""
    return {
        (one.pid, thread.id): thread.user_time + thread.system_time
        for one in process.family()
        for thread in one.threads()
    }


def profile(nodes: TimedNodes | RealNodes, forward: CostModel, added: Added) -> Profile:
    """What the planner is told of these nodes. `forward` has the scheduler's own cost on them."""
    return Profile(
        measured=Measured(at="", machine="this machine", model="of the bench", versions={}),
        node=NodeKind(
            pool_tokens=nodes.pool_tokens,
            page_size=nodes.page_size,
            context_length=nodes.context_length,
            max_running_requests=nodes.max_running_requests,
            chunked_prefill_size=nodes.chunked_prefill_size,
            kv_bytes_per_token=nodes.kv_bytes_per_token,
        ),
        forward=forward,
        transfer=TransferCost(latency_s=added.transfer_s, bytes_s=1e9, message_s=added.message_s),
        router=RouterCost(request_s=added.request_s, token_s=added.token_s),
    )


def timed_profile(nodes: TimedNodes, added: Added) -> Profile:
    """Of timed nodes, whose cost model knows of no scheduler: its cost is what was fitted."""
    return profile(nodes, replace(nodes.costs, step_s=added.step_s), added)


def predict(candidate: Candidate, requests: Sequence[SimRequest], nodes: Profile) -> Run:
    """The planner's answer."""
    return simulate(candidate, requests, profile=nodes, slo=SLO)


# --------------------------------------------------------------------------------------------------- rows
def main() -> Iterator[dict[str, Any]]:
    """What was fitted, then a row for each case, those that miss first."""
    added = fit()
    yield {"bench": "fit", **{f"{name[:-2]}_us": round(1e6 * s) for name, s in asdict(added).items()}}
    rows = [measured_row(candidate, part, added) for candidate, part in CASES]
    rows += [real_row(nodes, candidate, part, added) for nodes, candidate, part in REAL_CASES]
    yield from sorted(rows, key=order)


def measured_row(candidate: Candidate, part: Part, added: Added) -> dict[str, Any]:
    """Replay one case ROUNDS times, and predict it."""
    requests = part.requests(NODES.context_length)
    rounds = [measure(candidate, requests) for _ in range(ROUNDS)]
    predicted = predict(candidate, requests, timed_profile(NODES, added))
    return row("timed", candidate, part, requests, rounds, predicted)


def real_row(nodes: RealNodes, candidate: Candidate, part: Part, added: Added) -> dict[str, Any]:
    """The same with real kernels."""
    requests = part.requests(nodes.context_length)
    told = profile(nodes, nodes.forward(candidate.num_nodes), added)
    rounds = [measure_real(nodes, candidate, requests) for _ in range(ROUNDS)]
    return row(nodes.name, candidate, part, requests, rounds, predict(candidate, requests, told))


def row(
    kernels: str,
    candidate: Candidate,
    part: Part,
    requests: Sequence[SimRequest],
    rounds: Sequence[Replayed],
    predicted: Run,
) -> dict[str, Any]:
    """One case: of each figure the prediction, the mean of the rounds, the error, and how far the rounds differ."""
    measured = [figures(_figures(requests, seen), seen.cached_share) for seen in rounds]
    return {
        "bench": "error",
        "kernels": kernels,
        "fleet": candidate.name,
        "part": part.name,
        "rate": part.rate,
        "requests": len(requests),
        "cpu_share": round(max(seen.cpu_share for seen in rounds), 2),
        "late_ms": round(1e3 * max(seen.late_s for seen in rounds), 1),
        "load": round(max(seen.load for seen in rounds), 1),
        **compared(figures(figures_of_run(predicted, requests, SLO), predicted.cached_share), measured),
    }


def _figures(requests: Sequence[SimRequest], seen: Replayed) -> Figures:
    seconds = arrival_seconds([request.at_s for request in requests])
    return figures_of(list(seen.served.values()), len(seen.failed), seconds, SLO)


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
