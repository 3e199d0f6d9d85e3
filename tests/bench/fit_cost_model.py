"""Fits the simulator's cost model to the real engine: `python -m tests.bench.fit_cost_model` writes cost_model.json.

The real Batcher and Launcher drive the built-in model, one request after the other and without overlap, so that
each turn is one forward from its plan to its committed tokens. Prompts of several lengths, and decode steps of
several batches over several lengths of KV; the median of several rounds of each goes into a least-squares fit with
coefficients that are not negative.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import Engine, build_engine
from shared.engine.launcher import Launcher
from shared.protocol.messages import Finish, ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import Timeline

OUT = Path(__file__).with_name("cost_model.json")
PROMPT_LENGTHS = (16, 64, 128, 256, 512, 1024, 1536, 1920)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32)
DECODE_KV_LENGTHS = (64, 512, 1536)
ROUNDS = 5
DECODE_STEPS = 16


class Bench:
    """One engine, and requests that go through it one batch at a time."""

    def __init__(self, model: str = "builtin", cpu_cores: CpuCores | None = None) -> None:
        config = NodeConfig(
            model=ModelOptions(model=model, cpu_cores=cpu_cores),
            cache=CacheOptions(max_total_tokens=65_536, disable_radix_cache=True),
            schedule=ScheduleOptions(chunked_prefill_size=2048, max_running_requests=max(DECODE_BATCHES)),
        )
        self.options = config.schedule
        self.engine: Engine = build_engine(config, lambda what, fraction: None)
        self.batcher = Batcher(self.engine.ledger, config.schedule)
        self.launcher = Launcher(
            self.engine.stream, self.engine.ledger, self.engine.eos_token_ids, overlap=False
        )
        self._random = random.Random(0)
        self._num_reqs = 0

    def add(self, length: int, max_new_tokens: int) -> Req:
        """A prompt of random tokens waits."""
        self._num_reqs += 1
        ids = tuple(self._random.randrange(256, 4096) for _ in range(length))
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        key = ReqKey("bench", str(self._num_reqs))
        req = Req(key, Work(ids, params), Timeline(Role.DECODE), max_new_tokens)
        self.batcher.add(req)
        return req

    def turn_s(self) -> float:
        """Seconds of one forward, planned, launched and committed."""
        start = time.perf_counter()
        assert self.launcher.turn(self.batcher.plan()).worked
        return time.perf_counter() - start

    def end(self, req: Req) -> None:
        """Its pages are free again."""
        self.batcher.remove(req)
        if req.finish is None:
            req.end(Finish("abort"))
        assert req.kv is not None
        self.engine.ledger.cache_finished_req(req.kv, req.ids)
        req.kv = None

    def prefill_s(self, length: int) -> float:
        """One prompt, in one chunk."""
        req = self.add(length, 1)
        seconds = self.turn_s()
        self.end(req)
        return seconds

    def decode_s(self, batch: int, kv_len: int) -> float:
        """The median of some decode steps of `batch` requests with about `kv_len` tokens of KV each."""
        reqs = [self.add(kv_len - DECODE_STEPS // 2, DECODE_STEPS + 8) for _ in range(batch)]
        while self.batcher.waiting_queue or self.batcher.chunked_req is not None:
            self.turn_s()
        self.turn_s()
        seconds = statistics.median(self.turn_s() for _ in range(DECODE_STEPS))
        for req in reqs:
            self.end(req)
        return seconds


def median_of(measure: Callable[[], float]) -> float:
    """Of a few rounds."""
    return statistics.median(measure() for _ in range(ROUNDS))


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares over relative errors; a coefficient that would be negative is dropped, the rest fitted anew."""
    weights = 1 / np.array(seconds)
    x, y = np.array(rows, dtype=float) * weights[:, None], np.ones(len(seconds))
    used = list(range(x.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(x[:, used], y, rcond=None)
        if solution.min() >= 0:
            coefficients = np.zeros(x.shape[1])
            coefficients[used] = solution
            return [float(c) for c in coefficients]
        del used[int(solution.argmin())]


def error(rows: Sequence[Sequence[float]], seconds: Sequence[float], coefficients: Sequence[float]) -> float:
    """The mean relative error of the fit."""
    predicted = np.array(rows, dtype=float) @ np.array(coefficients)
    return round(float(np.mean(np.abs(predicted / np.array(seconds) - 1))), 3)


def main() -> dict[str, Any]:
    """Measure, fit, and return what is written."""
    bench = Bench()
    bench.prefill_s(256)
    prefill = {n: median_of(lambda n=n: bench.prefill_s(n)) for n in PROMPT_LENGTHS}  # type: ignore[misc]
    decode = {
        (batch, kv_len): bench.decode_s(batch, kv_len)
        for batch in DECODE_BATCHES
        for kv_len in DECODE_KV_LENGTHS
    }
    prefill_rows = [(1, n, n * n) for n in prefill]
    decode_rows = [(1, batch, batch * kv_len) for batch, kv_len in decode]
    abc = fit(prefill_rows, list(prefill.values()))
    d_e_f = fit(decode_rows, list(decode.values()))
    bench.engine.stream.close()
    return {
        "prefill": dict(zip("abc", abc, strict=True)),
        "decode": dict(zip("def", d_e_f, strict=True)),
        "measured": {
            "what": "built-in model, bfloat16, one process, overlap off; from plan to committed tokens, seconds",
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "rounds": ROUNDS,
            "prefill_s": {str(n): round(s, 6) for n, s in prefill.items()},
            "prefill_mean_relative_error": error(prefill_rows, list(prefill.values()), abc),
            "decode_s": {f"{batch}x{kv_len}": round(s, 6) for (batch, kv_len), s in decode.items()},
            "decode_mean_relative_error": error(decode_rows, list(decode.values()), d_e_f),
        },
    }


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    out.write_text(json.dumps(main(), indent=2) + "\n")
    print(out.read_text(), end="")
