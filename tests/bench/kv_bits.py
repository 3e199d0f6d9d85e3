"""What does a KV cache of int8 save, in memory and in decode steps?

The same model twice in one process, with KV pages of bf16 and of int8 (`--kv-cache-dtype`), steps of both in turn:

    speedup      step over bf16 / step over int8, the median of pairs
    kv_ratio     bytes of a token's KV, in memory and in every transfer, int8 / bf16
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tests.bench.forwards import Forwards
from tests.bench.machine import usable_cores
from tests.bench.models import SHAPES
from tests.bench.rounds import in_turn
from tests.bench.stats import figure, ratios
from tests.bench.table import Row

MODEL, CONTEXTS, BATCHES = "qwen3-0.6b", (2048, 8192), (1, 4)


def main() -> Iterator[dict[str, Any]]:
    """On one core and on all."""
    cores = usable_cores()
    yield from measure(cores[:1])
    if len(cores) > 1:
        yield from measure(cores)


def measure(cores: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of some cores."""
    shape, num_tokens = replace(SHAPES[MODEL], context_length=max(CONTEXTS)), max(BATCHES) * max(CONTEXTS)
    engines = [
        Forwards.on_cores(shape, cores, num_tokens=num_tokens, max_batch=max(BATCHES), kv_cache_dtype=dtype)
        for dtype in ("auto", "int8")
    ]
    nbytes = [engine.engine.layout.nbytes_per_token for engine in engines]
    try:
        for context in CONTEXTS:
            for batch in BATCHES:
                bf16_s, int8_s = in_turn(
                    [partial(engine.seconds, engine.decode(batch, context)) for engine in engines]
                )
                yield {
                    "bench": "kv_bits",
                    "model": MODEL,
                    "cores": len(cores),
                    "batch": batch,
                    "context": context,
                    "kv_ratio": round(nbytes[1] / nbytes[0], 3),
                    **figure("bf16_ms", [1e3 * s for s in bf16_s]),
                    **figure("int8_ms", [1e3 * s for s in int8_s]),
                    **figure("speedup", ratios(bf16_s, int8_s)),
                }
    finally:
        for engine in engines:
            engine.close()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The least speedup of the longest context, and the bytes."""
    return {
        "least_speedup_at_8k": min(row["speedup"] for row in rows if row["context"] == max(CONTEXTS)),
        "kv_ratio": rows[0]["kv_ratio"],
    }
