"""Against the engines that one would else take on a CPU: vLLM, OpenVINO GenAI, llama.cpp, transformers.

All run the same random weights, in bfloat16 or as `--weights` says, on the cores that this process may use (`taskset`
chooses them), in turn.
Peers are installed into .peers/ when they are needed first (`--install` does only that), each into a venv of its own;
one that cannot be is said and left out. Tables go to stderr, JSON lines to stdout, the last of a model sums it up.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.bench.leaving import leave_on_signals
from tests.bench.models import SHAPES
from tests.bench.peers.catalog import PEERS, installed
from tests.bench.peers.compare import ENGINES, WEIGHTS, compare
from tests.bench.peers.rounds import summary
from tests.bench.peers.workloads import WORKLOADS
from tests.bench.suite import measure, save
from tests.venvs import InstallError

SMALL = ("llama-160m", "qwen3-0.6b", "llama-4-layers")


def main() -> int:
    """Measure model after model. 1 when `--install` could not install all."""
    leave_on_signals()
    options = _options()
    if options.install:
        return _install([name for name in options.engines if name in PEERS])
    workloads = [workload for workload in WORKLOADS if workload.name in options.workloads]
    for model in options.models:
        weights = SHAPES[model].shipped or options.weights
        with tempfile.TemporaryDirectory(prefix="baton-peers-") as folder:
            of = partial(compare, model, workloads, options.engines, options.rounds, Path(folder))
            rows = partial(of, weights=weights)
            result = measure(result_name(model, weights), rows, summary)
        print(json.dumps({key: value for key, value in result.items() if key != "rows"}), flush=True)
        if options.save is not None:
            print(f"written to {save(result, options.save)}", file=sys.stderr)
    return 0


def result_name(model: str, weights: str = "bf16") -> str:
    """What its result is called, in letters that the page's marks allow."""
    return "peers_" + re.sub(r"\W", "_", model if weights == "bf16" else f"{model}_{weights}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    names = [workload.name for workload in WORKLOADS]
    several = partial(parser.add_argument, nargs="+", metavar="NAME")
    several(
        "--models", choices=SHAPES, default=SMALL, help=f"of {', '.join(SHAPES)} (default: the first three)"
    )
    several("--workloads", choices=names, default=names, help=f"of {', '.join(names)} (default: all)")
    several(
        "--engines", choices=ENGINES, default=list(ENGINES), help=f"of {', '.join(ENGINES)} (default: all)"
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=WEIGHTS[0],
        help="bf16; int8: W8A8 for Baton and vLLM, INT8 for OpenVINO, Q8_0 for llama.cpp; int4: W4A16, INT4, both in "
        "groups of 128, Q4_0 and (llamacpp-k) Q4_K_M. Models that are shipped quantized stay so",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each workload (default: 3)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/peers_MODEL.json")
    parser.add_argument("--install", action="store_true", help="install the peers, and measure nothing")
    return parser.parse_args()


def _install(names: list[str]) -> int:
    failed = 0
    for name in names:
        print(f"installing {name}", file=sys.stderr, flush=True)
        try:
            installed(name)
        except InstallError as error:
            print(f"{name} cannot be installed here: {error}", file=sys.stderr, flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
