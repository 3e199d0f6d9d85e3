"""`make bench`: every figure of the README, as tables on stderr and one JSON object a line on stdout.

`make bench ARGS="overlap multi_step"` runs these alone. `fleet` runs only when it is named: it takes both cores for
minutes.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tests.bench import (
    long_prompts,
    multi_step,
    overlap,
    router_load,
    scheduling,
    serving,
    simulation,
    transfer,
)
from tests.bench.table import report

BENCHES: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "scheduling": scheduling.main,
    "overlap": overlap.main,
    "multi_step": multi_step.main,
    "simulation": simulation.main,
    "transfer": transfer.main,
    "serving": serving.main,
    "router": router_load.main,
    "long_prompts": long_prompts.main,
    "fleet": lambda: [simulation.run_fleet()],
}
ONLY_BY_NAME = {"fleet"}


def run(names: Sequence[str]) -> None:
    """Run the benches one after the other; all but the longest when none is named."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        sys.exit(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    machine = {
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in names or [name for name in BENCHES if name not in ONLY_BY_NAME]:
        report({**figure, **machine} for figure in BENCHES[name]())


if __name__ == "__main__":
    run(sys.argv[1:])
