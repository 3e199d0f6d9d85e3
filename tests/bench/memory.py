"""Peak memory of nodes: 1P1D on this machine, of the built-in model and of larger ones with random weights, bf16 and
quantized.

Rows are the highest resident set of a node until then, and `beyond` is what neither weights nor KV pool account for:

idle       started, and its first generation is over
prompt     one long prompt
streams    16 at once, with top_p and logprobs
grammar    a JSON schema: the grammar library is loaded for it
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.model.files import resolve_model
from tests.bench.models import quantized_model, random_model
from tests.bench.table import Row
from tests.node_memory import BEYOND_MIB, footprints
from tests.processes import Router

STREAMS = 16
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 32
POOL_TOKENS = 16_384


def main() -> Iterator[Row]:
    """Each model in turn."""
    folders = {
        "builtin": resolve_model("builtin"),
        "llama-160m": random_model("llama-160m"),
        "qwen3-0.6b": random_model("qwen3-0.6b"),
        "qwen3-0.6b W8A8": quantized_model("qwen3-0.6b", "int8"),
        "qwen3-0.6b W4A16": quantized_model("qwen3-0.6b", "int4"),
    }
    for model, folder in folders.items():
        with tempfile.TemporaryDirectory() as logs:
            yield from measure(model, folder, Path(logs))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What the hungriest node has needed beyond weights and KV pool, and what is allowed."""
    return {"beyond_mib": max(row["beyond_mib"] for row in rows), "at_most_mib": BEYOND_MIB}


def measure(name: str, folder: Path, logs: Path) -> Iterator[Row]:
    """One service, and what it takes for more and more of its work."""
    with Router(logs, "--model", str(folder), "--max-total-tokens", str(POOL_TOKENS)) as router:
        router.wait_ready()
        for after, work in WORK.items():
            work(router)
            for node in footprints(router, folder):
                yield {
                    "bench": "memory",
                    "model": name,
                    "node": node.node,
                    "after": after,
                    "weights_mib": round(node.weights),
                    "kv_mib": round(node.kv),
                    "peak_mib": round(node.peak),
                    "beyond_mib": round(node.beyond),
                }


def prompt(router: Router) -> None:
    """One long one."""
    router.generate(_ids(0), OUTPUT_TOKENS).tokens()


def streams(router: Router) -> None:
    """Many at once."""
    sampling = {"temperature": 0.8, "top_p": 0.9}
    calls = [
        router.generate(
            _ids(1 + i), OUTPUT_TOKENS, sampling=sampling, return_logprob=True, top_logprobs_num=5
        )
        for i in range(STREAMS)
    ]
    for call in calls:
        call.tokens()


def grammar(router: Router) -> None:
    """On both nodes: the prefill node samples the first token."""
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}}'
    sampling = {"json_schema": schema, "ignore_eos": False}
    router.generate(_ids(99), OUTPUT_TOKENS, sampling=sampling).tokens()


WORK: dict[str, Callable[[Router], None]] = {
    "idle": lambda router: None,
    "prompt": prompt,
    "streams": streams,
    "grammar": grammar,
}


def _ids(seed: int) -> list[int]:
    """Of the smallest vocabulary; no other seed's begin alike."""
    return [3 + (seed * 7919 + i * 31) % 500 for i in range(PROMPT_TOKENS)]
