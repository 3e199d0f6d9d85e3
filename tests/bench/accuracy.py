"""How far are bf16 logits from those of float32, by torch and by the native kernels?

The same weights, which are bf16 already, and the same tokens: an extend of seven prompts, then eight decode steps
with given tokens. Errors are against the torch path in float32.

    rms       root mean square of the error, over the standard deviation of the logits
    max       the largest error, over the largest logit
    top1      share of rows whose likeliest token is that of float32
    apart     `max` between the two bf16 paths: as large as two errors that have nothing to do with each other make it
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.model.files import resolve_model
from tests.backend_rig import NUM_ROWS, Rig, rig
from tests.bench.models import SHAPES, random_model
from tests.bench.table import Row
from tests.modelzoo import ARCHITECTURES, make_model, random_prompt

NUM_PROMPTS, NUM_STEPS = NUM_ROWS - 1, 8


def main() -> Iterator[dict[str, Any]]:
    """Small random models of every architecture, random ones with the shapes of real ones, and the trained one."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ARCHITECTURES:
            yield measure(name, make_model(Path(scratch) / name, name, dtype="bfloat16"))
    for name in SHAPES:
        yield measure(name, random_model(name))
    yield measure("builtin", resolve_model("builtin"))


def measure(name: str, folder: Path) -> dict[str, Any]:
    """One model by all three paths."""
    exact = _logits(folder, "torch", torch.float32)
    by_torch = _logits(folder, "torch", torch.bfloat16)
    native = _logits(folder, "native", torch.bfloat16)
    row: dict[str, Any] = {"bench": "accuracy", "model": name, "rows": len(exact)}
    for path, logits in (("torch", by_torch), ("native", native)):
        error = logits - exact
        row[f"{path}_rms"] = round(float(error.square().mean().sqrt() / exact.std()), 5)
        row[f"{path}_max"] = round(float(error.abs().max() / exact.abs().max()), 5)
        row[f"{path}_top1"] = round(float((logits.argmax(-1) == exact.argmax(-1)).float().mean()), 3)
    row["apart"] = round(float((native - by_torch).abs().max() / exact.abs().max()), 5)
    return row


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The error of the native path over that of torch's, at its worst and at its best."""
    factors = [row["native_rms"] / row["torch_rms"] for row in rows]
    return {"rms_over_torch_max": round(max(factors), 2), "rms_over_torch_min": round(min(factors), 2)}


def _logits(folder: Path, kernels: str, dtype: torch.dtype) -> torch.Tensor:
    with rig(folder, kernels, dtype) as path:
        return _of_prompts_and_steps(path)


def _of_prompts_and_steps(path: Rig) -> torch.Tensor:
    prompts = [random_prompt(20 + 7 * i, seed=i) for i in range(NUM_PROMPTS)]
    parts = [path.extend({row: (0, ids) for row, ids in enumerate(prompts)})]
    for step in range(NUM_STEPS):
        path.future_map.last_token_R[:NUM_ROWS] = torch.tensor(random_prompt(NUM_ROWS, seed=100 + step))
        parts.append(path.forward({}, {row: len(ids) + step for row, ids in enumerate(prompts)}))
    return torch.cat(parts)
