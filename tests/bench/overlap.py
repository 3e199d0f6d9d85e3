"""How much of the scheduler's cost does overlap hide? Decode steps with one forward in flight against none.

The real Batcher and Launcher in one process, no network, on a core of their own: the forwards have another.
`num_running` requests take decode steps only; rounds with overlap off and on alternate over the same requests.

    forward_ms               what the forward stream is busy for a step
    wall_off_ms, wall_on_ms  one step, without overlap and with it
    cost_ms                  what the node adds to a forward without overlap: plan, launch, hand-over, commit
    hidden                   the share of that which overlap hides: 1 - (wall_on - forward) / (wall_off - forward)
    speedup                  throughput with overlap over that without; `speedup_bound` if all could be hidden
    added_ms                 pure Python added to every plan: more to hide, where the cost is small

Each figure is the median over blocks of steps, every block with requests of its own. The devices:

    builtin, llama-160m      a node's engine on one core; the name says which kernels compute. A native forward is a
                             call without the GIL; torch takes the GIL between its operations, and hides little
    timed wait               a forward that only takes time, as on a GPU
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shared.config import ScheduleOptions
from shared.engine.launcher import Launcher
from shared.protocol.messages import Finish
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.plan import Plan
from tests.bench.devices import Device, engine_device, make_req, release, timed_device
from tests.bench.machine import pinned, usable_cores
from tests.bench.stats import figure, hidden_share
from tests.bench.table import Row

ENGINES = {"builtin": (1, 8, 32, 64), "llama-160m": (1, 8, 32)}
ADDED = {"llama-160m": (8, 2.0)}
"""(running, ms)"""
TIMED_CASES = ((32, 5), (256, 2), (256, 5), (256, 10))
"""(running, ms of a forward)"""
PROMPT_LEN = 32
MAX_NEW_TOKENS = 512
POOL_TOKENS = 1024
"""Of each request: the Batcher keeps some back."""
LEAST_COST = 0.05
"""Of a step: what becomes of a smaller cost is lost in the noise, and says little in the summary."""
WARM_UP, STEPS, ROUNDS, BLOCKS = 10, 20, 4, 5


class Steps:
    """`num_running` requests that decode for as long as they are asked to."""

    def __init__(self, device: Device, num_running: int, added: range) -> None:
        self._added = added
        self._device = device
        self._batcher = Batcher(device.ledger, ScheduleOptions(max_running_requests=num_running))
        self._launchers = {
            overlap: Launcher(device.stream, device.ledger, device.eos_token_ids, overlap=overlap)
            for overlap in (False, True)
        }
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, ignore_eos=True)
        self._reqs = [make_req(rid, PROMPT_LEN, params) for rid in range(num_running)]
        for req in self._reqs:
            self._batcher.add(req)
        while self._batcher.waiting_queue or self._batcher.chunked_req is not None:
            self._turn(overlap=False)
        self.step_s(WARM_UP, overlap=False)
        self.step_s(WARM_UP, overlap=True)

    def step_s(self, num_steps: int, *, overlap: bool) -> float:
        """Seconds of a step: the mean, since with overlap a late one is followed by a quick one."""
        if overlap:
            self._turn(overlap=True)  # one is in flight from now on
        start = time.perf_counter()
        for _ in range(num_steps):
            self._turn(overlap=overlap)
        seconds = (time.perf_counter() - start) / num_steps
        if overlap:
            self._launchers[True].turn(Plan())
        return seconds

    def end(self) -> None:
        """Every page comes home."""
        for req in self._reqs:
            req.end(Finish("abort"))
            release(req, self._batcher, self._device.ledger)

    def _turn(self, *, overlap: bool) -> None:
        for _ in self._added:
            pass
        plan = self._batcher.plan()
        assert plan.batch is not None and (not plan.batch.is_extend or not overlap)
        assert not self._launchers[overlap].turn(plan).failed


def python_for(milliseconds: float) -> range:
    """So many turns of an empty loop take so long, undisturbed."""
    turns, quickest_s = 100_000, float("inf")
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(turns):
            pass
        quickest_s = min(quickest_s, time.perf_counter() - start)
    return range(int(turns * milliseconds / 1e3 / quickest_s))


def block(device: Device, num_running: int, added: range) -> tuple[float, float, float]:
    """Seconds of a step without overlap, of one with it, and of its forward: medians over rounds of one block."""
    steps = Steps(device, num_running, added)
    walls: dict[bool, list[float]] = {False: [], True: []}
    forwards_s = []
    gc.collect()
    gc.disable()  # a collection belongs to no step in particular
    try:
        for i in range(ROUNDS):
            for overlap in (False, True) if i % 2 == 0 else (True, False):  # KV grows: no order is favoured
                busy_before = device.busy_s()
                walls[overlap].append(steps.step_s(STEPS, overlap=overlap))
                if not overlap:
                    forwards_s.append((device.busy_s() - busy_before) / STEPS)
    finally:
        gc.enable()
    steps.end()
    return statistics.median(walls[False]), statistics.median(walls[True]), statistics.median(forwards_s)


def measure(device: Device, num_running: int, added_ms: float = 0.0) -> dict[str, Any]:
    """One row of the table."""
    added = python_for(added_ms)
    return {
        "bench": "overlap",
        "device": device.name,
        "num_running": num_running,
        "added_ms": added_ms,
        **figures([block(device, num_running, added) for _ in range(BLOCKS)], num_running),
    }


def figures(blocks: Sequence[tuple[float, float, float]], num_running: int) -> dict[str, Any]:
    """What blocks of (step without overlap, step with it, forward) come to."""
    off, on, forward = (statistics.median(column) for column in zip(*blocks, strict=True))
    cost = off - forward
    return {
        "forward_ms": round(1e3 * forward, 3),
        "wall_off_ms": round(1e3 * off, 3),
        "wall_on_ms": round(1e3 * on, 3),
        "cost_ms": round(1e3 * cost, 3),
        **figure("hidden", [hidden_share(*one) for one in blocks]),
        "tokens_s_off": round(num_running / off, 1),
        "tokens_s_on": round(num_running / on, 1),
        **figure("speedup", [one[0] / one[1] for one in blocks]),
        "speedup_bound": round(off / max(forward, cost), 3),
    }


def main() -> Iterator[dict[str, Any]]:
    """Row by row."""
    cores = usable_cores()
    for model, all_running in ENGINES.items():
        device = engine_device(model, max(all_running), num_tokens=max(all_running) * POOL_TOKENS)
        with pinned(cores[1:] or cores):
            for num_running in all_running:
                yield measure(device, num_running)
            if model in ADDED:
                yield measure(device, *ADDED[model])
        device.stream.close()
    with pinned(cores[:1]):
        for num_running, step_ms in TIMED_CASES:
            yield measure(timed_device(num_running, step_s=step_ms / 1e3), num_running)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The share hidden behind the engine's forwards and behind a device's, where the cost is large enough to tell."""
    plain = [row for row in rows if row["cost_ms"] >= LEAST_COST * row["wall_off_ms"]]
    own = [row for row in plain if not row["device"].startswith("timed")]
    timed = [row for row in plain if row["device"].startswith("timed")]
    return {
        "devices": sorted({row["device"] for row in own}),
        "least_hidden": min((row["hidden"] for row in own), default=None),
        "least_hidden_timed": min((row["hidden"] for row in timed), default=None),
        "rows_left_out": len(rows) - len(plain),
    }
