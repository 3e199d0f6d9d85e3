"""Two schools of hiding the scheduler: overlap, which plans every step, and multi-step, which plans every k steps.

A multi-step node plans once; if that is a decode batch it launches k forwards back to back (the FutureMap carries
the tokens from one to the next), then commits all k. What it pays: the forwards after an unforeseen stop are thrown
away, up to k - 1 for each request, and an arrival waits until all k are done. Overlap throws one away for each stop.

Requests arrive at random times of the wall clock and stop at tokens that nobody foresees: they sample at temperature
1, and one token id in 48 stops them. Every row has the same requests, seeds and arrival times.

    saturated           all are there at once: `useful_tokens_s`, as long as somebody waits, is what the node can do
    steady              they come at a rate below that, and so do the tokens: `wait_ms` from arrival to the plan that
                        takes the request in, `ttft_ms` from arrival to its first token of this node, committed
    prefilled here      one node does both. Every prefill interrupts all decodes, so that planning less often has
                        another effect: arrivals are prefilled together, which costs them time and saves forwards
    prefilled elsewhere a decode node whose transfers have just landed: the two schools and nothing else

`thrown_away` is the share of the output tokens computed that nobody gets. The built-in model's forward shares the
GIL with the scheduler; the timed wait does not (see devices).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shared.engine.launcher import Launcher
from shared.scheduling.plan import Plan, ScheduleBatch, schedule
from tests.bench.devices import TIMED, Device, builtin_device, timed_device
from tests.bench.open_loop import BenchNode, Load, Seen
from tests.bench.table import Row

KS = (1, 2, 4, 8)
ROUNDS = 3
BUILTIN_RUNNING = 32
BUILTIN_LOADS = (Load(num_reqs=64, rate=None), Load(num_reqs=32, rate=6.0))
TIMED_RUNNING = 256
TIMED_LOADS = (
    Load(num_reqs=1024, rate=None, prefilled=True),
    Load(num_reqs=1024, rate=500.0, prefilled=True),
    Load(num_reqs=768, rate=None),
    Load(num_reqs=512, rate=200.0),
)


class OverlapNode(BenchNode):
    """A plan for every step, made while the step before runs: Baton's own way."""

    def __init__(self, device: Device, max_running: int) -> None:
        super().__init__(device, max_running)
        self._launcher = Launcher(device.stream, device.ledger, device.eos_token_ids, overlap=True)

    def turn(self) -> bool:
        return self.advance(self._launcher, self.plan())


class MultiStepNode(BenchNode):
    """A plan for every k decode steps. Each of the k Launchers holds one of the forwards in flight."""

    def __init__(self, device: Device, max_running: int, k: int) -> None:
        super().__init__(device, max_running)
        self._launchers = [
            Launcher(device.stream, device.ledger, device.eos_token_ids, overlap=True) for _ in range(k)
        ]

    def turn(self) -> bool:
        plan, launched = self.plan(), []
        for launcher in self._launchers:
            if plan.batch is None:
                break
            self.advance(launcher, plan)
            launched.append(launcher)
            plan = self._same_again(plan.batch) if len(launched) < len(self._launchers) else Plan()
        for launcher in launched:
            self.advance(launcher, Plan())
        return bool(launched)

    def _same_again(self, batch: ScheduleBatch) -> Plan:
        """The next step of a decode batch, of those that want one, unless pages for it are missing."""
        if batch.is_extend:
            return Plan()
        reqs = [item.req for item in batch.items if item.req.wants_decode]
        kvs = [req.kv for req in reqs if req.kv is not None]
        if not reqs or not all(self.ledger.grow(kv, kv.kv_allocated_len + 1) for kv in kvs):
            return Plan()
        return Plan(ScheduleBatch(decodes=tuple(schedule(req, 1, samples=True) for req in reqs)))


def run(device: Device, max_running: int, load: Load, k: int | None) -> Seen:
    """One load on one kind of node; None is overlap."""
    node = OverlapNode(device, max_running) if k is None else MultiStepNode(device, max_running, k)
    device.ledger.flush()
    gc.collect()
    gc.disable()  # a collection belongs to no school in particular
    try:
        seen = node.serve(load)
    finally:
        gc.enable()
    assert len(seen.ttfts_ms) == load.num_reqs
    return seen


def compare(device: Device, max_running: int, load: Load) -> Iterator[dict[str, Any]]:
    """Overlap and every k, in alternating rounds."""
    kinds = (None, *KS)
    rounds: dict[int | None, list[Seen]] = {k: [] for k in kinds}
    run(device, max_running, load, None)  # for warming up
    for i in range(ROUNDS):
        for k in kinds if i % 2 == 0 else kinds[::-1]:
            rounds[k].append(run(device, max_running, load, k))
    for k, seen in rounds.items():
        rates = [s.tokens_s for s in seen]
        yield {
            "bench": "multi_step",
            "device": device.name,
            "arrivals": "prefilled elsewhere" if load.prefilled else "prefilled here",
            "load": "saturated" if load.rate is None else f"steady, {load.rate:g}/s",
            "max_running": max_running,
            "school": "overlap" if k is None else f"multi-step k={k}",
            "useful_tokens_s": round(statistics.median(rates), 1),
            "spread": [round(min(rates), 1), round(max(rates), 1)],
            "thrown_away": round(1 - sum(s.num_useful for s in seen) / sum(s.num_computed for s in seen), 4),
            "mean_output_len": round(statistics.mean(s.num_useful for s in seen) / load.num_reqs, 1),
            "wait_ms_mean": median(statistics.mean(s.waits_ms) for s in seen),
            "wait_ms_p99": median(p99(s.waits_ms) for s in seen),
            "ttft_ms_mean": median(statistics.mean(s.ttfts_ms) for s in seen),
            "ttft_ms_p99": median(p99(s.ttfts_ms) for s in seen),
        }


def median(rounds: Iterable[float]) -> float:
    """Of the rounds: a hiccup of the machine in one of them does not count."""
    return round(statistics.median(rounds), 2)


def p99(values: Sequence[float]) -> float:
    """The nearest rank."""
    return sorted(values)[len(values) * 99 // 100]


def main() -> Iterator[dict[str, Any]]:
    """Row by row."""
    device = builtin_device(BUILTIN_RUNNING)
    for load in BUILTIN_LOADS:
        yield from compare(device, BUILTIN_RUNNING, load)
    device.stream.close()
    device = timed_device(TIMED_RUNNING, step_s=5e-3, prompt_token_s=2e-5)
    for load in TIMED_LOADS:
        yield from compare(device, TIMED_RUNNING, load)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Tokens a second of the timed device, saturated, prefilled elsewhere: overlap against the best k."""
    alike = [
        row
        for row in rows
        if (row["device"], row["arrivals"], row["load"]) == (TIMED, "prefilled elsewhere", "saturated")
    ]
    rates = {row["school"]: row["useful_tokens_s"] for row in alike}
    overlap = rates.pop("overlap")
    best = max(rates, key=lambda school: rates[school])
    return {"overlap_tokens_s": overlap, "best_multi_step": best, "best_multi_step_tokens_s": rates[best]}
