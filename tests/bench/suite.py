"""The benches by name, and how one is run and kept.

A bench is a module with two functions: `main() -> Iterable[Row]` measures, row by row; `summary(rows) -> dict` says
in a few figures what came out, and is what `targets` compares with what was promised.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.machine import machine
from tests.bench.table import Row, report


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where it is, and what it asks."""

    module: str
    question: str
    only_by_name: bool = False
    """Too long for every run, or in need of what is not installed."""


BENCHES: dict[str, Bench] = {
    "decode": Bench(module="decode", question="How near is a decode step to what the machine allows?"),
    "experts": Bench(
        module="experts", question="How near is a mixture of experts to a read of a token's weights?"
    ),
    "weight_bits": Bench(module="weight_bits", question="What do weights of 8 and 4 bits save?"),
    "kv_bits": Bench(module="kv_bits", question="What does a KV cache of int8 save?"),
    "quantized_linear": Bench(
        module="quantized_linear", question="How fast is a quantized layer, against torch's own kernels?"
    ),
    "prefill": Bench(module="prefill", question="How near is a prefill to oneDNN's best GEMM rate?"),
    "attention": Bench(
        module="attention", question="How near are the attention kernels to what the machine allows?"
    ),
    "scheduling": Bench(module="scheduling", question="How long does one scheduling decision take?"),
    "overlap": Bench(module="overlap", question="How much of the scheduler's cost does overlap hide?"),
    "transfer": Bench(module="transfer", question="How fast do KV pages move, against what carries them?"),
    "serving": Bench(module="serving", question="Tokens a second and times to first token, end to end?"),
    "interference": Bench(
        module="interference", question="What does a prefill do to the streams that are running?"
    ),
    "trace": Bench(module="trace_serving", question="How does a fleet serve a recorded workload?"),
    "router": Bench(module="router_load", question="What does a token cost in the router?"),
    "failover": Bench(
        module="failover", question="What does a client see of a node that dies, and of a stream that moves?"
    ),
    "cold_start": Bench(module="cold_start", question="How long does it take to start, and why?"),
    "memory": Bench(module="memory", question="How much memory does a node need beyond weights and KV pool?"),
    "quantized": Bench(
        module="quantized", question="How far do quantized weights move the model?", only_by_name=True
    ),
    "sockets": Bench(
        module="sockets",
        question="How fast do KV pages move over gloo, TCP and TLS, against raw TCP?",
        only_by_name=True,
    ),
    "planner": Bench(
        module="planner",
        question="How far are the planner's predictions from what is measured?",
        only_by_name=True,
    ),
}


def run(name: str) -> dict[str, Any]:
    """Measure a bench by its name; see `measure`."""
    print(f"{name}: {BENCHES[name].question}", file=sys.stderr, flush=True)
    module = importlib.import_module(f"tests.bench.{BENCHES[name].module}")
    return measure(name, module.main, module.summary)


def measure(
    name: str,
    main: Callable[[], Iterable[Row]],
    summary: Callable[[Sequence[Row]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Measure, print rows as they come, and return them with their summary and the machine."""
    about, start = machine(), time.perf_counter()
    rows = report(main())
    return {
        "bench": name,
        "summary": summary(rows),
        "machine": about,
        "seconds": round(time.perf_counter() - start),
        "rows": rows,
    }


def save(result: Mapping[str, Any], folder: Path) -> Path:
    """Write FOLDER/NAME.json, a line for each row, so that a new run is a readable change."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in result.items() if key != "rows"}
    lines = ",\n  ".join(json.dumps(row) for row in result["rows"])
    path = folder / f"{result['bench']}.json"
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')
    return path


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The kept results by name."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {result["bench"]: result for result in results}
