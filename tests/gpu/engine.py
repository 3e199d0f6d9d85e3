"""How near an engine is to what the GPU can do: a decode step, a prefill, and how long the GPU waits for the host.

decode    a step from its launch on the forward stream until that of the next one, two in flight as in a node with
          overlap. Its limit: to read the weights and the KV of all sequences once, at the rate of `copy`
prefill   a prompt in one forward. Its limit: the operations of the model and its attention, at the rate of `gemm`
idle      the share of a node's decode step in which the GPU has nothing to do: the real scheduler's step against
          the time that the GPU needs for it
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.cli import node_config
from shared.config import NodeConfig
from shared.engine.model_worker_batch import ModelWorkerBatch
from tests.bench.devices import Device
from tests.bench.forwards import Forwards
from tests.bench.overlap import Steps
from tests.forked import node_parser
from tests.gpu.limits import measured
from tests.gpu.rows import Row, Target, Verdict, figure
from tests.gpu.shapes import Model, dummy_model
from tests.gpu.steps import Place, Report
from tests.gpu.timing import seconds_of

GRAPHS, EAGER, EXACT = "graphs", "eager", "exact"
MODES: dict[str, tuple[str, ...]] = {GRAPHS: (), EAGER: ("--disable-cuda-graph",), EXACT: ("--exact",)}
BATCHES, CONTEXT = (1, 8, 64, 256), 2048
PROMPTS = (2048, 8192)
IDLE_BATCHES, IDLE_CONTEXT, IDLE_STEPS = (1, 64), 96, 40
DRY_BATCHES, DRY_CONTEXT, DRY_PROMPTS = (1, 2), 64, (48,)
DECODE_TARGETS = {1: Target(at_least=0.75), 64: Target(at_least=0.65)}
PREFILL_TARGET = Target(at_least=0.5)
IDLE_TARGETS = {"8b": Target(at_most=0.05), "0.6b": Target(at_most=0.10)}
EXACT_TARGET = Target(at_most=1.15)
ROOM = 0.85
"""Of the GPU's memory, for weights and KV: a batch that needs more is skipped."""
DECODE_STEPS = 30


def run(place: Place, report: Report, argument: str) -> None:
    """`MODEL/MODE`: measure one engine."""
    name, mode = argument.split("/")
    limits = measured(place)
    Bench(place, report, dummy_model(place, name), mode, limits).run()


@dataclass(frozen=True)
class Bench:
    """One model in one mode."""

    place: Place
    report: Report
    model: Model
    mode: str
    limits: dict[str, float]

    def run(self) -> None:
        """Build the engine, measure everything, and leave the times for the modes that follow."""
        times_path = self.place.out / f"{self.model.name}.{self.mode}.json"
        times_path.unlink(missing_ok=True)  # of an earlier run
        batches, context = (DRY_BATCHES, DRY_CONTEXT) if self.place.is_dry else (BATCHES, CONTEXT)
        prompts = DRY_PROMPTS if self.place.is_dry else PROMPTS
        fitting = [batch for batch in batches if self._fits(batch, context)]
        for batch in sorted({*batches} - {*fitting}):
            note = f"{self._nbytes(batch, context) / 2**30:.0f} GiB of weights and KV do not fit"
            self.report(Row(what=f"decode {batch}", verdict=Verdict.SKIP, note=note))
        begun = time.perf_counter()
        forwards = Forwards(self._config(max(fitting), context, max(prompts)), self.model.shape)
        what = f"{self.model.name} {self.mode}: start"
        self.report(figure(what, time.perf_counter() - begun, "s", note=f"{forwards.kernels} kernels"))
        times: dict[str, float] = {}
        for batch in fitting:
            times[f"decode {batch}"] = self._decode(forwards, batch, context)
        for length in prompts if self.mode != EAGER else ():
            times[f"prefill {length}"] = self._prefill(forwards, length)
        if self.mode != EXACT:
            self._idle(forwards, [batch for batch in IDLE_BATCHES if batch <= max(fitting)])
        forwards.close()
        times_path.write_text(json.dumps(times))
        if self.mode == EXACT:
            self._cost(times)

    def _decode(self, forwards: Forwards, batch: int, context: int) -> float:
        seconds = step_s(forwards, forwards.decode(batch, context), DECODE_STEPS)
        shape = self.model.shape
        limit_s = (shape.weight_nbytes + batch * context * shape.kv_nbytes) / self.limits["copy_gb_s"] / 1e9
        self._figure(
            f"decode {batch}", seconds, limit_s, DECODE_TARGETS.get(batch), f"{batch / seconds:.0f} tokens/s"
        )
        return seconds

    def _prefill(self, forwards: Forwards, length: int) -> float:
        batch = forwards.extend(0, length)
        seconds = sorted(forwards.seconds(batch) for _ in range(5))[2]
        shape = self.model.shape
        flops = length * shape.linear_flops + shape.lm_head_flops + shape.attention_flops(0, length)
        limit_s = flops / self.limits["gemm_tflop_s"] / 1e12
        self._figure(
            f"prefill {length}", seconds, limit_s, PREFILL_TARGET, f"{length / seconds:.0f} tokens/s"
        )
        return seconds

    def _figure(self, what: str, seconds: float, limit_s: float, target: Target | None, note: str) -> None:
        """The share of the limit. Targets are those of the 8B, in the mode that a node has by itself."""
        if self.model.name != "8b" or self.mode != GRAPHS or self.place.is_dry:
            target = None
        note = f"of the limit; {1e3 * seconds:.3f} ms, {note}"
        name = f"{self.model.name} {self.mode}: {what}"
        self.report(
            figure(
                name, limit_s / seconds, target=target, note=note, ms=1e3 * seconds, limit_ms=1e3 * limit_s
            )
        )

    def _idle(self, forwards: Forwards, batches: Sequence[int]) -> None:
        """With overlap and without, a step of the real scheduler against the GPU's time for it."""
        engine = forwards.engine
        device = Device(
            name=self.model.name,
            stream=engine.stream,
            ledger=engine.ledger,
            eos_token_ids=engine.eos_token_ids,
            busy_s=lambda: 0.0,
        )
        for batch in batches:
            busy_s = busy_seconds(forwards, forwards.decode(batch, IDLE_CONTEXT), self.place.device)
            steps = Steps(device, batch, range(0))
            for overlap in (True, False):
                wall_s = steps.step_s(IDLE_STEPS, overlap=overlap)
                by_itself = overlap and self.mode == GRAPHS and not self.place.is_dry
                self.report(
                    figure(
                        f"{self.model.name} {self.mode}: idle {batch}{'' if overlap else ', serial'}",
                        1 - busy_s / wall_s,
                        target=IDLE_TARGETS[self.model.name] if by_itself else None,
                        note=f"GPU {1e3 * busy_s:.3f} of {1e3 * wall_s:.3f} ms",
                    )
                )
            steps.end()

    def _cost(self, times: dict[str, float]) -> None:
        """Of exact mode, against the times that another step has left."""
        path = self.place.out / f"{self.model.name}.{GRAPHS}.json"
        base: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        if not base:
            note = f"run the step `{self.model.name}` before"
            self.report(Row(what="cost of --exact", verdict=Verdict.SKIP, note=note))
        for what in (what for what in times if what in base):
            name = f"{self.model.name}: cost of --exact, {what}"
            target = None if self.place.is_dry else EXACT_TARGET
            self.report(figure(name, times[what] / base[what], "x", target=target))

    def _config(self, max_batch: int, context: int, max_prompt: int) -> NodeConfig:
        tokens = max(max_batch * (context + 16), max_prompt + 16, max(IDLE_BATCHES) * 1024)
        flags = [*self.model.flags, *MODES[self.mode], "--device", self.place.device]
        flags += ["--mem-fraction-static", "0.9"]
        flags += ["--chunked-prefill-size", str(max_prompt)]
        flags += ["--max-total-tokens", str(tokens), "--max-running-requests", str(max(max_batch, 64))]
        return node_config(node_parser(), flags)

    def _nbytes(self, batch: int, context: int) -> int:
        return self.model.shape.weight_nbytes + batch * context * self.model.shape.kv_nbytes

    def _fits(self, batch: int, context: int) -> bool:
        if self.place.is_dry:
            return True
        return self._nbytes(batch, context) < ROOM * torch.cuda.mem_get_info()[0]


def step_s(forwards: Forwards, batch: ModelWorkerBatch, num_steps: int) -> float:
    """Seconds of a forward with another one in flight behind it."""
    stream, in_flight = forwards.engine.stream, []
    for i in range(num_steps + 5):
        if i == 5:
            begun = time.perf_counter()
        in_flight.append(stream.sample(stream.submit(batch)))
        if len(in_flight) == 2:
            in_flight.pop(0).wait()
    seconds = (time.perf_counter() - begun) / num_steps
    in_flight.pop().wait()
    return seconds


def busy_seconds(forwards: Forwards, batch: ModelWorkerBatch, device: str) -> float:
    """The GPU's time for a forward whose launches were all queued before it began."""
    stream = forwards.engine.stream
    if device == "cpu":
        return min(forwards.seconds(batch) for _ in range(5))
    results = []

    def queue(i: int) -> None:
        results.append(stream.sample(stream.submit(batch)))

    best = []
    for _ in range(5):
        with stream._stream.use():  # the one that a forward is queued on, and its events have to be
            best.append(seconds_of(queue, device, repeats=2, warm_up=0))
        while results:
            results.pop().wait()
    return min(best)
