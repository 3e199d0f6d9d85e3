"""How near is a single stream of a mixture of experts, or of a model with windows, to what reading its weights takes?

Decode steps of models with the widths of Qwen3-30B-A3B and gpt-oss-20b, in fewer layers and with a smaller
vocabulary, and of Gemma 3 1B, on the node's own engine. Experts are ten times the largest cache, and each step has
another token, so a step reads experts that no cache has. In turn with the steps, on the same cores:

    read_gb_s    a streaming read of memory that lies in no cache
    ratio_read   what reading once the weights of a token would take / the step: attention, routers, the experts of a
                 token and the lm_head, with the scales of quantized ones
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tests.bench.forwards import Forwards
from tests.bench.limits import StreamingRead
from tests.bench.machine import usable_cores
from tests.bench.models import SHAPES, VOCAB_SIZE, Shape, read_nbytes
from tests.bench.rounds import in_turn
from tests.bench.stats import figure, ratios
from tests.bench.table import Row

CONTEXT, STEPS = 64, 8


class Model(NamedTuple):
    """A config, and how its weights are quantized while they are loaded. None: as the config says."""

    name: str
    shape: Shape
    quantization: str | None


QWEN3 = replace(SHAPES["qwen3-30b-a3b-like"], num_layers=8, vocab_size=VOCAB_SIZE)
GPT_OSS = replace(SHAPES["gpt-oss-20b-like"], num_layers=4, vocab_size=VOCAB_SIZE)
MODELS = (
    Model("Qwen3-30B-A3B", QWEN3, "int4"),
    Model("Qwen3-30B-A3B", QWEN3, "int8"),
    Model("gpt-oss-20b", GPT_OSS, None),
    Model("Gemma 3 1B", SHAPES["gemma-3-1b"], "int4"),
)


def main() -> Iterator[dict[str, Any]]:
    """Weights of 4 and 8 bits, on one core and on all."""
    cores = usable_cores()
    for model in MODELS:
        yield from measure(model, cores[:1])
        if len(cores) > 1:
            yield from measure(model, cores)


def measure(model: Model, cores: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One engine."""
    forwards = Forwards.on_cores(
        model.shape, cores, num_tokens=16 * CONTEXT, max_batch=1, quantization=model.quantization
    )
    read, nbytes = StreamingRead(cores), read_nbytes(forwards.engine.model_config, 0)
    try:
        gb_s, step_s = in_turn([read.gb_s, steps_of(forwards)], about_s=10.0)
        yield {
            "bench": "experts",
            "model": model.name,
            "weights": model.quantization or "mxfp4",
            "kernels": forwards.kernels,
            "cores": len(cores),
            "token_mb": round(nbytes / 1e6),
            **figure("step_ms", [1e3 * s for s in step_s]),
            **figure("tokens_s", [1 / s for s in step_s]),
            **figure("read_gb_s", gb_s),
            **figure("ratio_read", ratios([nbytes / 1e9 / rate for rate in gb_s], step_s)),
        }
    finally:
        forwards.close()


def steps_of(forwards: Forwards) -> Callable[[], float]:
    """Seconds of a decode step, the mean of a few, each of a token that is drawn anew."""
    tokens, step = np.random.default_rng(0), forwards.decode(1, CONTEXT)

    def seconds() -> float:
        drawn = [int(token) for token in tokens.integers(forwards.shape.vocab_size, size=STEPS)]
        return sum(forwards.seconds(replace(step, future_writes=((0, token),))) for token in drawn) / STEPS

    return seconds


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The worst ratio."""
    worst = min(rows, key=lambda row: row["ratio_read"])
    return {
        "least_ratio_read": worst["ratio_read"],
        "least_ratio_read_at": f"{worst['weights']}, {worst['cores']} cores",
    }
