"""How near is a decode step to what the machine allows, by batch and context?

One step on the node's own engine, from its launch until its tokens are on the host, without a scheduler. In turn with
it, on the same cores:

    read_gb_s     a streaming read of memory that lies in no cache
    gemm_gflop_s  oneDNN's GEMMs of one layer with as many rows as the batch, but at least 16, their weights in
                  the cache:
                  of fewer rows the cache would be what is measured, not the arithmetic

A step has to read all weights and the K and V of all sequences once, and to multiply: its limit is the longer of the
two times. `ratio` is limit / step, and `ratio_read` is the time of reading alone / step. Where the second is the
smaller, the arithmetic is what holds the step up: without matrix units that is so from a batch of 16 or so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from tests.bench.forwards import Forwards
from tests.bench.limits import Gemms, StreamingRead
from tests.bench.machine import usable_cores
from tests.bench.models import Shape
from tests.bench.rounds import in_turn
from tests.bench.stats import figure, ratios
from tests.bench.table import Row

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (512, 2048)
FEW_BATCHES = (1, 8, 32)
FEW_CONTEXTS = (512,)
LEAST_GEMM_ROWS = 16


def main() -> Iterator[dict[str, Any]]:
    """Every batch and context of the small model on one core; some of the larger one, and on all cores."""
    cores = usable_cores()
    yield from measure("llama-160m", cores[:1], BATCHES, CONTEXTS)
    yield from measure("qwen3-0.6b", cores[:1], FEW_BATCHES, FEW_CONTEXTS)
    if len(cores) > 1:
        yield from measure("llama-160m", cores, FEW_BATCHES, FEW_CONTEXTS)


def measure(
    model: str, cores: Sequence[int], batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The rows of one engine."""
    max_tokens = max(batches) * max(contexts)
    forwards = Forwards.on_cores(model, cores, num_tokens=max_tokens, max_batch=max(batches))
    read, shape = StreamingRead(cores), forwards.shape
    try:
        for batch in batches:
            gemms = Gemms(max(batch, LEAST_GEMM_ROWS), shape.linears, len(cores))
            for context in contexts:
                step = forwards.decode(batch, context)
                gb_s, gflop_s, step_s = in_turn([read.gb_s, gemms.gflop_s, partial(forwards.seconds, step)])
                yield {
                    "bench": "decode",
                    "model": model,
                    "kernels": forwards.kernels,
                    "cores": len(cores),
                    "batch": batch,
                    "context": context,
                    **figures(shape, batch, context, gb_s, gflop_s, step_s),
                }
    finally:
        forwards.close()


def figures(
    shape: Shape,
    batch: int,
    context: int,
    gb_s: Sequence[float],
    gflop_s: Sequence[float],
    step_s: Sequence[float],
) -> dict[str, Any]:
    """What rounds of (read rate, GEMM rate, step) come to."""
    nbytes = shape.weight_nbytes + batch * context * shape.kv_nbytes
    flops = batch * (shape.linear_flops + shape.lm_head_flops)
    read_s = [nbytes / 1e9 / rate for rate in gb_s]
    multiply_s = [flops / 1e9 / rate for rate in gflop_s]
    limit_s = [max(both) for both in zip(read_s, multiply_s, strict=True)]
    return {
        **figure("step_ms", [1e3 * s for s in step_s]),
        **figure("tokens_s", [batch / s for s in step_s]),
        **figure("read_gb_s", gb_s),
        **figure("gemm_gflop_s", gflop_s),
        "bound_by": "reading" if sum(read_s) >= sum(multiply_s) else "arithmetic",
        **figure("ratio", ratios(limit_s, step_s)),
        **figure("ratio_read", ratios(read_s, step_s)),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The worst ratio over all batches on one core, and that of a single stream."""
    of_one_core = [row for row in rows if row["cores"] == 1]
    worst = min(of_one_core, key=lambda row: row["ratio"])
    single = [row for row in of_one_core if row["batch"] == 1]
    return {
        "kernels": sorted({row["kernels"] for row in rows}),
        "least_ratio": worst["ratio"],
        "least_ratio_at": f"{worst['model']}, batch {worst['batch']}, context {worst['context']}",
        "least_ratio_read": min(row["ratio_read"] for row in of_one_core),
        "single_stream_ratio_read": min(row["ratio_read"] for row in single),
    }
