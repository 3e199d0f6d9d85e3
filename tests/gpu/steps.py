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
GPU = "cuda:0"
"""With its index, as a node's own device has one: torch makes no current device of one without."""
LIMIT_S = 470.0
"""Of all steps of one command, which has 10 s more to end the last one: 8 minutes together."""


class Skipped(Exception):
    """The step cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step runs, and how large its shapes are."""

    device: str
    """`GPU`, or `cpu` in a dry run."""
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
    """What is kept for it, whatever the steps before it do. It has the time too that those have not used."""
    argument: str = ""
    """Which of the module's steps it is."""


TEST_STEPS: dict[str, Step] = {
    "machine": Step(module="machine", asks="What is here?", limit_s=20),
    "kernels": Step(module="checks", asks="Is each kernel what its twin is?", limit_s=85, argument="kernels"),
    "golden": Step(
        module="checks",
        asks="Are tokens those of transformers and of one node?",
        limit_s=100,
        argument="golden",
    ),
    "exactness": Step(
        module="checks", asks="Are bits the same over every cut?", limit_s=55, argument="exactness"
    ),
    "fleet": Step(
        module="checks",
        asks="Do two processes on one GPU survive kill -9?",
        limit_s=85,
        argument="fleet",
    ),
    "matrix": Step(
        module="checks", asks="Does the kill matrix hold on a GPU?", limit_s=75, argument="matrix"
    ),
    "sanitizer": Step(module="sanitizer", asks="Does compute-sanitizer find anything?", limit_s=50),
}
BENCH_STEPS: dict[str, Step] = {
    "machine": Step(module="machine", asks="What is here?", limit_s=20),
    "limits": Step(module="limits", asks="What can the GPU do?", limit_s=25),
    "8b": Step(module="engine", asks="8B: decode, prefill, idle share", limit_s=75, argument="8b/graphs"),
    "0.6b": Step(
        module="engine", asks="0.6B: decode, prefill, idle share", limit_s=45, argument="0.6b/graphs"
    ),
    "transfer": Step(module="transfer", asks="Pages between two processes", limit_s=45),
    "kernels": Step(module="kernels", asks="Each kernel against torch's operations", limit_s=50),
    "questions": Step(module="questions", asks="What only a GPU can answer", limit_s=25),
    "8b-exact": Step(module="engine", asks="8B: what does --exact cost?", limit_s=45, argument="8b/exact"),
    "mixed-load": Step(module="mixed_load", asks="1P1D against one node", limit_s=90),
    "0.6b-eager": Step(module="engine", asks="0.6B without graphs", limit_s=25, argument="0.6b/eager"),
    "8b-eager": Step(module="engine", asks="8B without graphs", limit_s=25, argument="8b/eager"),
}
COMMANDS = {"test": TEST_STEPS, "bench": BENCH_STEPS}
CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bench", ("questions", "limits")),
    ("test", ("machine", "kernels", "golden", "exactness")),
    ("bench", ("limits", "8b", "0.6b")),
    ("test", ("fleet", "matrix")),
    ("bench", ("limits", "transfer")),
    ("bench", ("mixed-load",)),
    ("test", ("sanitizer",)),
)
"""Commands with some of their steps, each with LIMIT_S to itself, for a GPU that is lent for minutes at a time.

What all that is exact stands on comes first. A machine may be new for each call, so shares have limits beside them.
"""
