"""How far do quantized weights move the model, here and in transformers?

The built-in model on windows of its held-out text, one token after the other. Distances are from float32:

    kl            Kullback-Leibler divergence of next-token distributions, nats
    perplexity    of the text
    top1          share of positions whose likeliest token is that of float32
    their_kl      what transformers has for the same file. Where it computes weights alone (all but W8A8), this is the
                  dense model that the file stands for: activations of 8 bits are what the difference costs
    weight_only_kl  with `--weight-only-quantization`
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shared.model.files import resolve_model
from tests.bench.table import Row
from tests.quantized_accuracy import (
    FORMATS,
    ON_LOAD,
    Distance,
    held_out,
    native_logits,
    their_logits,
    write_format,
)

NUM_WINDOWS, LENGTH = 4, 512


def main() -> Iterator[dict[str, Any]]:
    """bf16, what is made while loading, and every format."""
    windows, builtin = held_out(NUM_WINDOWS, LENGTH), resolve_model("builtin")
    exact = their_logits(builtin, windows)

    def row(
        name: str, ours: Distance, theirs: Distance | None = None, weight_only: Distance | None = None
    ) -> dict[str, Any]:
        figures = {key: round(value, 5) for key, value in asdict(ours).items()}
        others = {"their_kl": theirs, "weight_only_kl": weight_only}
        kl = {key: None if of is None else round(of.kl, 5) for key, of in others.items()}
        return {"bench": "quantized", "format": name, **figures, **kl}

    yield row("float32", Distance.of(exact, exact, windows))
    yield row("bf16", Distance.of(native_logits(builtin, windows), exact, windows))
    logits = native_logits(builtin, windows, kv_dtype=torch.int8)
    yield row("--kv-cache-dtype int8", Distance.of(logits, exact, windows))
    for flag, quantization in ON_LOAD.items():
        yield row(flag, Distance.of(native_logits(builtin, windows, quantization), exact, windows))
    with tempfile.TemporaryDirectory() as scratch:
        for name in FORMATS:
            folder = write_format(name, Path(scratch) / name)
            theirs = their_logits(folder if name == "W8A8" else folder / "dense", windows)
            ours, weight_only = Distance.of(native_logits(folder, windows), exact, windows), None
            if name not in ("W8A8", "FP8 channel", "FP8 blocks"):
                weight_only = Distance.of(native_logits(folder, windows, weight_only=True), exact, windows)
            yield row(name, ours, Distance.of(theirs, exact, windows), weight_only)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How much more the formats lose here than in transformers, in nats."""
    more = {row["format"]: round(row["kl"] - row["their_kl"], 5) for row in rows if row["their_kl"]}
    worst = max(more, key=lambda name: more[name])
    return {"most_kl_above_transformers": more[worst], "at": worst}
