"""From a command to its first answer: `router` alone (1P1D, the built-in model), and `--help` of each command.

A start is watched from outside, by the lines that router and nodes log. A phase lasts until both nodes have ended it:

spawn       the router's imports, until both nodes are started
imports     a node's, until it begins to load
weights     config and weights
engine      KV pool (touched at once), ledger, kernels
join        until the router knows both nodes
generation  the proof: 24 tokens through both nodes

The limit is `import torch` by two processes beside each other, which both nodes have to do. Kernels are built before
(`make` does it): how long the compiler takes is a row of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.bench.stats import figure, ratios
from tests.bench.table import Row
from tests.processes import free_port

STARTS = 5
HELPS = 5
START_TIMEOUT_S = 120
COMMANDS = ("router", "prefill_node", "decode_node")
NUM_NODES = 2
MARKS = {
    "spawn": (r"\[router\] node_started ", NUM_NODES),
    "imports": (r"^\S+: loading weights", NUM_NODES),
    "weights": (r"^\S+: allocating KV pages", NUM_NODES),
    "engine": (r" engine_ready ", NUM_NODES),
    "join": (r"\[router-0\] router_ready ", 1),
    "generation": (r"^Serving ", 1),
}
"""What is logged at the end of each phase, and how often."""


def main() -> Iterator[Row]:
    """`--help` of each command, and the phases of a start."""
    for command in COMMANDS:
        times = [run_s([sys.executable, "-m", command, "--help"]) for _ in range(HELPS)]
        yield {"bench": "help", "command": command.replace("_", "-"), **figure("seconds", times)}
    with tempfile.TemporaryDirectory() as empty:
        build = run_s([sys.executable, "-m", "shared.kernels.cpu"], {"BATON_CACHE_DIR": empty})
    yield {"bench": "build", "command": "python -m shared.kernels.cpu", **figure("seconds", [build])}
    run_s([sys.executable, "-m", "shared.kernels.cpu"])
    limits, starts = list[float](), list[dict[str, float]]()
    for _ in range(STARTS):
        limits.append(import_torch_s())
        starts.append(start())
    ready = [sum(phases.values()) - phases["generation"] for phases in starts]
    whole = {
        "ready": ready,
        "first answer": [sum(phases.values()) for phases in starts],
        "limit: import torch": limits,
        "ready / limit": ratios(ready, limits),
    }
    for phase in MARKS:
        yield {"bench": "cold_start", "phase": phase, **figure("seconds", [s[phase] for s in starts])}
    for what, values in whole.items():
        yield {"bench": "cold_start", "phase": what, **figure("seconds", values)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Until it is ready, until its first answer, the slowest --help, and the compiler."""
    seconds = {row["phase"]: row["seconds"] for row in rows if row["bench"] == "cold_start"}
    return {
        "ready_s": seconds["ready"],
        "first_answer_s": seconds["first answer"],
        "ready_of_import_torch": seconds["ready / limit"],
        "build_s": next(row["seconds"] for row in rows if row["bench"] == "build"),
        "slowest_help_s": max(row["seconds"] for row in rows if row["bench"] == "help"),
    }


def start() -> dict[str, float]:
    """Seconds of each phase of one start; the router is stopped again."""
    command = [sys.executable, "-u", "-m", "router", "--port", str(free_port()), "--control-port", "0"]
    begun = time.perf_counter()
    router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ends = _ends(router, begun)
    finally:
        router.send_signal(signal.SIGTERM)
        router.communicate(timeout=START_TIMEOUT_S)
    begins = [begun, *ends]
    return {phase: end - begin for phase, begin, end in zip(MARKS, begins, ends, strict=False)}


def _ends(router: subprocess.Popen[str], begun: float) -> list[float]:
    """When each phase ended for the last process that goes through it."""
    assert router.stdout is not None
    seen: dict[str, list[float]] = {phase: [] for phase in MARKS}
    for line in router.stdout:
        now = time.perf_counter()
        for phase, (mark, _) in MARKS.items():
            if re.search(mark, line):
                seen[phase].append(now)
        if all(len(seen[phase]) >= times for phase, (_, times) in MARKS.items()):
            return [seen[phase][times - 1] for phase, (_, times) in MARKS.items()]
        if now - begun > START_TIMEOUT_S:
            break
    raise RuntimeError("the router did not start, or logged other lines than this bench knows")


def import_torch_s() -> float:
    """Seconds until as many processes as there are nodes have imported torch, all at once."""
    command = [sys.executable, "-c", "import torch"]
    begun = time.perf_counter()
    processes = [subprocess.Popen(command) for _ in range(NUM_NODES)]
    for process in processes:
        if process.wait(START_TIMEOUT_S) != 0:
            raise RuntimeError("torch cannot be imported")
    return time.perf_counter() - begun


def run_s(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """Seconds that a command takes; `environment` comes on top of this process's."""
    begun = time.perf_counter()
    more = {**os.environ, **(environment or {})}
    subprocess.run(command, check=True, capture_output=True, timeout=START_TIMEOUT_S, env=more)
    return time.perf_counter() - begun
