"""The steps of `make test-gpu` and `make bench-gpu`, and how one is run.

A step is a module of this package with a function `run(place, report)`. It reports each row as soon as the row is
there, so a step that its time box ends keeps what it has found. It raises `Skipped` where it cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.rows import Row

Report = Callable[[Row], None]
LIMIT_S = 480.0
"""Of all steps of one command."""


class Skipped(Exception):
    """The step cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step runs, and how large its shapes are."""

    device: str
    """`cuda`, or `cpu` in a dry run."""
    out: Path
    """Where files of the run are kept. Steps that follow each other read what an earlier one has left here."""
    scratch: Path
    """A folder of the step's own."""

    @property
    def is_dry(self) -> bool:
        """Whether shapes are tiny and figures say nothing."""
        return self.device == "cpu"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process of a command."""

    module: str
    asks: str
    limit_s: float
    argument: str = ""
    """Which of the module's steps it is."""


TEST_STEPS: dict[str, Step] = {
    "machine": Step(module="machine", asks="What is here?", limit_s=40),
    "kernels": Step(
        module="checks", asks="Is each kernel what its twin is?", limit_s=120, argument="kernels"
    ),
    "golden": Step(
        module="checks",
        asks="Are tokens those of transformers and of one node?",
        limit_s=130,
        argument="golden",
    ),
    "exactness": Step(
        module="checks", asks="Are bits the same over every cut?", limit_s=60, argument="exactness"
    ),
    "fleet": Step(
        module="checks",
        asks="Do two processes on one GPU survive kill -9?",
        limit_s=100,
        argument="fleet",
    ),
    "matrix": Step(
        module="checks", asks="Does the kill matrix hold on a GPU?", limit_s=120, argument="matrix"
    ),
    "sanitizer": Step(module="sanitizer", asks="Does compute-sanitizer find anything?", limit_s=90),
}
BENCH_STEPS: dict[str, Step] = {
    "machine": Step(module="machine", asks="What is here?", limit_s=40),
    "limits": Step(module="limits", asks="What can the GPU do?", limit_s=40),
    "8b": Step(module="engine", asks="8B: decode, prefill, idle share", limit_s=100, argument="8b/graphs"),
    "0.6b": Step(
        module="engine", asks="0.6B: decode, prefill, idle share", limit_s=70, argument="0.6b/graphs"
    ),
    "transfer": Step(module="transfer", asks="Pages between two processes", limit_s=60),
    "kernels": Step(module="kernels", asks="Each kernel against torch's operations", limit_s=60),
    "questions": Step(module="questions", asks="What only a GPU can answer", limit_s=60),
    "8b-exact": Step(module="engine", asks="8B: what does --exact cost?", limit_s=60, argument="8b/exact"),
    "mixed-load": Step(module="mixed_load", asks="1P1D against one node", limit_s=130),
    "0.6b-eager": Step(module="engine", asks="0.6B without graphs", limit_s=40, argument="0.6b/eager"),
    "8b-eager": Step(module="engine", asks="8B without graphs", limit_s=50, argument="8b/eager"),
}
COMMANDS = {"test": TEST_STEPS, "bench": BENCH_STEPS}
