"""How near is a prefill to oneDNN's best GEMM rate, by length and cached prefix?

One forward over a prompt's new tokens on the node's own engine, from its launch until its first token is on the host.
In turn with it, on the same cores and with as many rows, oneDNN's GEMMs of one layer: the faster of plain and packed
weights.

    ratio       floating point operations of the linear layers / time, over oneDNN's rate
    ratio_all   the same with those of attention, which no GEMM rate bounds but which have to be computed as well

A prompt longer than `--chunked-prefill-size` (512 by default) goes through in several such forwards: the rows with a
cached prefix are those after the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from tests.bench.forwards import Forwards
from tests.bench.limits import Gemms
from tests.bench.machine import usable_cores
from tests.bench.models import Shape
from tests.bench.rounds import in_turn
from tests.bench.stats import figure, ratios
from tests.bench.table import Row

CASES = ((0, 128), (0, 512), (0, 1024), (0, 2048), (512, 512), (1536, 512), (2048, 128), (3584, 512))
"""(cached, computed) tokens."""
FEW_CASES = ((0, 512), (0, 2048))
MAX_TOKENS = 4096


def main() -> Iterator[dict[str, Any]]:
    """Every case of the small model on one core; some of the larger one, and on all cores."""
    cores = usable_cores()
    yield from measure("llama-160m", cores[:1], CASES)
    yield from measure("qwen3-0.6b", cores[:1], FEW_CASES[-1:])
    if len(cores) > 1:
        yield from measure("llama-160m", cores, FEW_CASES)


def measure(model: str, cores: Sequence[int], cases: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The rows of one engine."""
    forwards = Forwards.on_cores(model, cores, num_tokens=MAX_TOKENS, max_batch=1)
    shape = forwards.shape
    try:
        for cached, length in cases:
            gemms, extend = Gemms(length, shape.linears, len(cores)), forwards.extend(cached, length)
            gflop_s, prefill_s = in_turn([gemms.gflop_s, partial(forwards.seconds, extend)])
            yield {
                "bench": "prefill",
                "model": model,
                "kernels": forwards.kernels,
                "cores": len(cores),
                "cached": cached,
                "length": length,
                **figures(shape, cached, length, gflop_s, prefill_s),
            }
    finally:
        forwards.close()


def figures(
    shape: Shape, cached: int, length: int, gflop_s: Sequence[float], prefill_s: Sequence[float]
) -> dict[str, Any]:
    """What rounds of (GEMM rate, prefill) come to."""
    linear_gflop = (length * shape.linear_flops + shape.lm_head_flops) / 1e9
    all_gflop = linear_gflop + shape.attention_flops(cached, length) / 1e9
    return {
        **figure("prefill_ms", [1e3 * s for s in prefill_s]),
        **figure("tokens_s", [length / s for s in prefill_s]),
        **figure("gemm_gflop_s", gflop_s),
        **figure("ratio", ratios([linear_gflop / s for s in prefill_s], gflop_s)),
        **figure("ratio_all", ratios([all_gflop / s for s in prefill_s], gflop_s)),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """2048 tokens at once, on one core."""
    of_2k = [row for row in rows if (row["cores"], row["cached"], row["length"]) == (1, 0, 2048)]
    return {
        "kernels": sorted({row["kernels"] for row in rows}),
        "ratio_2k": min(row["ratio"] for row in of_2k),
        **{f"tokens_s_2k_{row['model']}": row["tokens_s"] for row in of_2k},
    }
