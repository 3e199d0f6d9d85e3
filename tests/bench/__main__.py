"""`make bench`: every figure of the README, one JSON object a line."""

from __future__ import annotations

import json
import platform

import torch

from tests.bench import scheduling, serving, transfer


def run() -> None:
    """Run the benchmarks one after the other."""
    machine = {
        "cpus": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for figure in [*scheduling.main(), *transfer.main(), *serving.main()]:
        print(json.dumps({**figure, **machine}), flush=True)


if __name__ == "__main__":
    run()
