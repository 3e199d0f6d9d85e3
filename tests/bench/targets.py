"""What was promised of this machine's own limits, and what the kept results say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
"""By the name of the bench."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure of a bench's summary, and its bound: at least so much, or at most."""

    what: str
    bench: str
    key: str
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def bound(self) -> str:
        """In words."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}{self.unit}"
        return f"at most {self.at_most:g}{self.unit}"

    def is_met(self, value: float) -> bool:
        """Whether `value` keeps the bound."""
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most

    def reached(self, results: Results) -> float | None:
        """The figure; None if the bench was not run, or says nothing of it."""
        result = results.get(self.bench)
        return None if result is None else result["summary"].get(self.key)


_PEERS = (("llama-160m", "peers_llama_160m"), ("qwen3-0.6b", "peers_qwen3_0_6b"))
_AGAINST_PEERS = tuple(
    Target(what=f"{model}, {what}", bench=bench, key=f"baton-0P1D_{key}", **more)
    for model, bench in _PEERS
    for what, key, more in (
        ("single stream over HTTP: streaming read / token", "of_read_limit", {"at_least": 0.75}),
        (
            "speed over the best peer's, the worst other workload",
            "least_against_best",
            {"at_least": 1.2, "unit": "x"},
        ),
        ("peak memory / vLLM's with as large a KV pool", "memory_over_vllm", {"at_most": 1.0, "unit": "x"}),
    )
)

TARGETS = (
    Target(
        what="decode step, batch 1 to 32: limit (reading or arithmetic, the longer) / step, the worst case",
        bench="decode",
        key="least_ratio",
        at_least=0.75,
    ),
    Target(
        what="decode step, batch 1 to 32: streaming read / step, the worst case",
        bench="decode",
        key="least_ratio_read",
        at_least=0.6,
    ),
    Target(
        what="single-stream decode: streaming read / step, the worst case",
        bench="decode",
        key="single_stream_ratio_read",
        at_least=0.75,
    ),
    Target(
        what="single-stream decode of mixtures of experts and Gemma 3 1B: streaming read / step, the worst case",
        bench="experts",
        key="least_ratio_read",
        at_least=0.7,
    ),
    Target(
        what="paged decode attention / streaming read, the worst case",
        bench="attention",
        key="decode_least_ratio",
        at_least=0.8,
    ),
    Target(
        what="prefill of 2k tokens / oneDNN's GEMM rate",
        bench="prefill",
        key="ratio_2k",
        at_least=0.6,
    ),
    Target(
        what="transfer over shared memory / memcpy",
        bench="transfer",
        key="shm_ratio",
        at_least=0.7,
    ),
    Target(what="transfer over gloo / raw gloo", bench="transfer", key="gloo_ratio", at_least=0.7),
    Target(
        what="scheduling cost hidden by overlap, two cores, the worst case",
        bench="overlap",
        key="least_hidden",
        at_least=0.6,
    ),
    Target(
        what="ITL p99 beside a 2k prefill: one node doing both / 1P1D",
        bench="interference",
        key="unsplit_over_split",
        at_least=3,
        unit="x",
    ),
    Target(
        what="from kill -9 of a node until the router knows it, p99",
        bench="failover",
        key="detected_p99_ms",
        at_most=100,
        unit=" ms",
    ),
    Target(
        what="pause of a stream that moves to another decode node / its step, median, the worst case",
        bench="failover",
        key="moved_pause_steps",
        at_most=2,
        unit="x",
    ),
    Target(
        what="from `router` to ready, built-in model",
        bench="cold_start",
        key="ready_s",
        at_most=10,
        unit=" s",
    ),
    Target(what="`--help`, the slowest", bench="cold_start", key="slowest_help_s", at_most=0.5, unit=" s"),
    Target(
        what="a node's peak memory beyond weights and KV pool",
        bench="memory",
        key="beyond_mib",
        at_most=400,
        unit=" MiB",
    ),
    *_AGAINST_PEERS,
)


def targets_table(results: Results, others: Mapping[str, Results]) -> str:
    """Markdown: each target and what was reached, with a column for each of `others`; what missed is bold."""
    head = ["target", "bound", "reached", *(f"reached, {name}" for name in others)]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for target in TARGETS:
        cells = [target.what, target.bound, *(_reached(target, of) for of in (results, *others.values()))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _reached(target: Target, results: Results) -> str:
    value = target.reached(results)
    if value is None:
        return "–"
    return f"{value:g}{target.unit}" if target.is_met(value) else f"**{value:g}{target.unit}, missed**"
