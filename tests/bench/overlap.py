"""What overlap is worth: decode steps with one forward in flight against none, on two kinds of device.

The real Batcher and Launcher in one process, no network. `num_running` requests take decode steps only; rounds with
overlap off and on alternate over the same requests.

wall_off_ms, wall_on_ms   one step; medians of all steps
added_ms                  pure Python added to every plan, as it takes undisturbed: where the real cost is too small
                          beside the forward to tell what becomes of it
cost_ms                   what the host does for a step when overlap is off: plan, launch, commit; all but waiting
cost_on_ms                the same with overlap on; more than `cost_ms` where the host waits for the GIL
hidden                    share of `cost_ms` that overlap hides: (wall_off - wall_on) / cost; with its standard error
                          from round to round, which is large where the cost is small beside the forward. Waiting is
                          also for the hand-over between threads, and for a core on a busy machine: overlap hides that
                          as well, so more than all of the cost may be hidden
speedup                   throughput with overlap on over off. Its bound: only the longer of forward and cost remains

    built-in model   its forward is a thread of the same interpreter: torch lets the GIL go within its operations, and
                     takes it back between them, so the host's work and the forward's mostly take turns. The cost is
                     a few percent of such a forward at most: there is next to nothing to hide
    timed wait       a forward that only takes time, as on a GPU. The gain is 1 + cost / forward as long as the cost
                     is the shorter. SGLang's up to 1.3x is where batches are large and forwards short
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shared.config import ScheduleOptions
from shared.engine.launcher import Launcher
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.kvcache.host_pages import PageCopy
from shared.protocol.messages import Finish
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.sampled import Sampled
from tests.bench.devices import Device, builtin_device, make_req, release, timed_device
from tests.bench.table import Row

BUILTIN_RUNNING = (1, 8, 32)
TIMED_RUNNING = (32, 256)
TIMED_STEP_MS = (2, 5, 10)
ADDED_MS = 4
PROMPT_LEN = 32
MAX_NEW_TOKENS = 512
WARM_UP, STEPS, ROUNDS, BLOCKS = 10, 10, 6, 5


class WaitClock:
    """A ForwardStream that counts the seconds spent waiting for the one below it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.waited_s = 0.0

    def submit(self, batch: ModelWorkerBatch) -> Any:
        """See ForwardStream."""
        return self._stream.submit(batch)

    def sample(self, forwarded: Any, vocab_mask: Any = None) -> _Waiting:
        """See ForwardStream."""
        return _Waiting(self, self._stream.sample(forwarded, vocab_mask))

    def copy(self, pages: PageCopy) -> Any:
        """See ForwardStream."""
        return self._stream.copy(pages)

    def close(self) -> None:
        """See ForwardStream."""
        self._stream.close()


class _Waiting:
    def __init__(self, clock: WaitClock, result: Any) -> None:
        self._clock = clock
        self._result = result

    def wait(self) -> Sampled:
        start = time.perf_counter()
        sampled: Sampled = self._result.wait()
        self._clock.waited_s += time.perf_counter() - start
        return sampled


class Steps:
    """`num_running` requests that decode for as long as they are asked to."""

    def __init__(self, device: Device, num_running: int, added: range) -> None:
        self._added = added
        self._ledger = device.ledger
        self._clock = WaitClock(device.stream)
        self._batcher = Batcher(device.ledger, ScheduleOptions(max_running_requests=num_running))
        self._launchers = {
            overlap: Launcher(self._clock, device.ledger, device.eos_token_ids, overlap=overlap)
            for overlap in (False, True)
        }
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, ignore_eos=True)
        self._reqs = [make_req(rid, PROMPT_LEN, params) for rid in range(num_running)]
        for req in self._reqs:
            self._batcher.add(req)
        while self._batcher.waiting_queue or self._batcher.chunked_req is not None:
            self._turn(overlap=False)
        self.measure(WARM_UP, overlap=False)
        self.measure(WARM_UP, overlap=True)

    def measure(self, num_steps: int, *, overlap: bool) -> list[tuple[float, float]]:
        """Milliseconds of each step: of wall time, and of what was not waiting for the forward."""
        if overlap:
            self._turn(overlap=True)  # one is in flight from now on
        times = []
        for _ in range(num_steps):
            start, self._clock.waited_s = time.perf_counter(), 0.0
            self._turn(overlap=overlap)
            wall_s = time.perf_counter() - start
            times.append((1e3 * wall_s, 1e3 * (wall_s - self._clock.waited_s)))
        if overlap:
            self._launchers[True].turn(None)
        return times

    def end(self) -> None:
        """Every page comes home."""
        for req in self._reqs:
            req.end(Finish("abort"))
            release(req, self._batcher, self._ledger)

    def _turn(self, *, overlap: bool) -> None:
        for _ in self._added:
            pass
        batch = self._batcher.get_next_batch()
        assert batch is not None and (not batch.is_extend or not overlap)
        _, failed = self._launchers[overlap].turn(batch)
        assert not failed


def python_for(milliseconds: float) -> range:
    """So many turns of an empty loop take so long, undisturbed."""
    turns, quickest_s = 100_000, float("inf")
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(turns):
            pass
        quickest_s = min(quickest_s, time.perf_counter() - start)
    return range(int(turns * milliseconds / 1e3 / quickest_s))


def measure(device: Device, num_running: int, added_ms: float = 0) -> dict[str, Any]:
    """One row of the table."""
    added = python_for(added_ms)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    gains: list[float] = []
    for _ in range(BLOCKS):
        steps = Steps(device, num_running, added)
        gc.collect()
        gc.disable()  # a collection belongs to no step in particular
        try:
            for i in range(ROUNDS):
                for overlap in (
                    (False, True) if i % 2 == 0 else (True, False)
                ):  # KV grows: no order is favoured
                    times[overlap] += steps.measure(STEPS, overlap=overlap)
                gains.append(medians(times[False][-STEPS:])[0] - medians(times[True][-STEPS:])[0])
        finally:
            gc.enable()
        steps.end()
    off, cost = medians(times[False])
    on, cost_on = medians(times[True])
    error = statistics.stdev(gains) / len(gains) ** 0.5
    return {
        "bench": "overlap",
        "device": device.name,
        "num_running": num_running,
        "added_ms": added_ms,
        "forward_ms": round(off - cost, 2),
        "wall_off_ms": round(off, 3),
        "wall_on_ms": round(on, 3),
        "cost_ms": round(cost, 3),
        "cost_on_ms": round(cost_on, 3),
        "hidden": round((off - on) / cost, 2),
        "hidden_error": round(error / cost, 2),
        "tokens_s_off": round(1e3 * num_running / off, 1),
        "tokens_s_on": round(1e3 * num_running / on, 1),
        "speedup_bound": round(off / max(off - cost, cost), 3),
        "speedup": round(off / on, 3),
        "speedup_error": round(error / on, 3),
    }


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Of each column."""
    walls, costs = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(costs)


def main() -> Iterator[dict[str, Any]]:
    """Row by row."""
    device = builtin_device(max(BUILTIN_RUNNING))
    for num_running in BUILTIN_RUNNING:
        yield measure(device, num_running)
    yield measure(device, 1, added_ms=ADDED_MS)
    device.stream.close()
    for num_running in TIMED_RUNNING:
        for step_ms in TIMED_STEP_MS:
            yield measure(timed_device(num_running, step_s=step_ms / 1e3), num_running)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The share of the scheduler's cost that is hidden, on each device."""
    return {f"{row['device']}, {row['num_running']} running": row["hidden"] for row in rows}
