"""What do weights of 8 and 4 bits save, in decode steps and in a prefill (of the first model alone)?

The same model four times in one process, with bf16, int8 and int4 weights (`--quantization`), those of int4 also with
activations of 16 bits (`--weight-only-quantization`), each step in turn with the others and with a streaming read on
the same cores:

    int8_speedup   step of bf16 / step of int8, the median of pairs
    ratio_read     what reading the weights and the KV once would take / the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from shared.engine.model_worker_batch import ModelWorkerBatch
from tests.bench.forwards import Forwards
from tests.bench.limits import StreamingRead
from tests.bench.machine import usable_cores
from tests.bench.models import Shape
from tests.bench.rounds import in_turn
from tests.bench.stats import figure, ratios
from tests.bench.table import Row

MODELS = ("qwen3-0.6b", "llama-160m", "qwen2.5-1.5b")
BATCHES = (1, 2, 4, 8, 16)
CONTEXT, PROMPT = 64, 2048
ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4_weight_only": {"quantization": "int4", "weight_only": True},
}
Step = Callable[[Forwards], ModelWorkerBatch]


def main() -> Iterator[dict[str, Any]]:
    """Models of known shapes on one core and on all."""
    cores = usable_cores()
    for model in MODELS:
        yield from measure(model, cores[:1])
        if len(cores) > 1:
            yield from measure(model, cores)


def measure(model: str, cores: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of some cores."""
    read = StreamingRead(cores)
    engines = {
        name: Forwards.on_cores(model, cores, num_tokens=16 * CONTEXT + PROMPT, max_batch=16, **options)
        for name, options in ENGINES.items()
    }
    shape = engines["bf16"].shape
    steps: list[tuple[str, int, int, Step]] = [
        ("decode", batch, batch * CONTEXT, lambda forwards, batch=batch: forwards.decode(batch, CONTEXT))
        for batch in BATCHES
    ]
    if model == MODELS[0]:
        steps.append(("prefill", 1, PROMPT, lambda forwards: forwards.extend(0, PROMPT)))
    try:
        for name, batch, num_tokens, step in steps:
            runs = [partial(engine.seconds, step(engine)) for engine in engines.values()]
            gb_s, *seconds = in_turn([read.gb_s, *runs])
            took = dict(zip(engines, seconds, strict=True))
            row: dict[str, Any] = {
                "bench": "weight_bits",
                "model": model,
                "cores": len(cores),
                "step": name,
                "batch": batch,
                "tokens": num_tokens,
            }
            for bits, of_bits in took.items():
                nbytes = weight_nbytes(shape, bits) + num_tokens * shape.kv_nbytes * (name == "decode")
                row |= figure(f"{bits}_ms", [1e3 * s for s in of_bits])
                if name == "decode":
                    row |= figure(
                        f"{bits}_ratio_read", ratios([nbytes / 1e9 / rate for rate in gb_s], of_bits)
                    )
            for bits in tuple(took)[1:]:
                row |= figure(f"{bits}_speedup", ratios(took["bf16"], took[bits]))
            yield row
    finally:
        for engine in engines.values():
            engine.close()


def weight_nbytes(shape: Shape, bits: str) -> int:
    """What a decode step reads of the weights: codes, and float32 scales of groups of 128 inputs."""
    lm_head, layers = shape.lm_head_flops // 2, shape.linear_flops // 2
    if bits == "bf16":
        return 2 * (lm_head + layers)
    return lm_head * 33 // 32 + layers * (33 if bits == "int8" else 17) // 32


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The least speedups, by what is asked of them."""
    of_one = [row for row in rows if row["cores"] == 1]
    few = [row for row in of_one if row["step"] == "decode" and row["batch"] <= 8]
    single = [row for row in few if row["batch"] == 1]
    prefill = next(row for row in of_one if row["step"] == "prefill")
    return {
        "int8_least_decode_speedup": min(row["int8_speedup"] for row in few),
        "int4_single_stream_speedup": min(row["int4_speedup"] for row in single),
        "int4_least_over_int8": min(round(row["int4_speedup"] / row["int8_speedup"], 2) for row in few),
        "int8_prefill_speedup": prefill["int8_speedup"],
        "int8_single_stream_ratio_read": min(row["int8_ratio_read"] for row in single),
        "int4_single_stream_ratio_read": min(row["int4_ratio_read"] for row in single),
    }
