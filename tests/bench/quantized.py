"""How far do quantized weights move the model, here and in transformers?

The built-in model and SmolLM2 on windows of text that the former has not seen. Distances are from float32:

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
from tests.bench.smollm2 import smollm2
from tests.bench.table import Row
from tests.quantized_accuracy import (
    ON_LOAD,
    Distance,
    formats,
    held_out,
    logits_with_fp8,
    native_logits,
    their_logits,
)
from tests.quantized_models import quantize_folder

NUM_WINDOWS, LENGTH = 4, 512


def main() -> Iterator[dict[str, Any]]:
    """Both models, with the largest groups that divide their layers."""
    yield from measure("builtin", resolve_model("builtin"), group_size=128)
    yield from measure("smollm2-135m", smollm2(), group_size=64)


def measure(model: str, dense: Path, *, group_size: int) -> Iterator[dict[str, Any]]:
    """bf16, what is made while loading, and every format."""
    windows = held_out(dense, NUM_WINDOWS, LENGTH)
    exact = their_logits(dense, windows)

    def row(
        name: str, ours: Distance, theirs: Distance | None = None, weight_only: Distance | None = None
    ) -> dict[str, Any]:
        figures = {key: round(value, 5) for key, value in asdict(ours).items()}
        others = {"their_kl": theirs, "weight_only_kl": weight_only}
        kl = {key: None if of is None else round(of.kl, 5) for key, of in others.items()}
        return {"bench": "quantized", "model": model, "format": name, **figures, **kl}

    def distance(logits: torch.Tensor) -> Distance:
        return Distance.of(logits, exact, windows)

    yield row("float32", distance(exact))
    yield row("bf16", distance(native_logits(dense, windows)))
    yield row("--kv-cache-dtype int8", distance(native_logits(dense, windows, kv_dtype=torch.int8)))
    for flag, quantization in ON_LOAD.items():
        yield row(flag, distance(native_logits(dense, windows, quantization)))
    for name, how in formats(group_size).items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = quantize_folder(dense, Path(scratch) / name, how())
            theirs = distance(their_logits(folder if name == "W8A8" else folder / "dense", windows))
            ours, weight_only = distance(native_logits(folder, windows)), None
            if name != "W8A8" and not name.startswith("FP8"):
                weight_only = distance(native_logits(folder, windows, weight_only=True))
            yield row(name, ours, theirs, weight_only)
            if name == "FP8 blocks":
                yield row(f"{name}, on GPUs", distance(logits_with_fp8(folder, windows)), theirs)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How much more the formats lose here than in transformers, in nats."""
    more = {
        f"{row['model']} {row['format']}": round(row["kl"] - row["their_kl"], 5)
        for row in rows
        if row["their_kl"]
    }
    worst = max(more, key=lambda name: more[name])
    return {"most_kl_above_transformers": more[worst], "at": worst}
