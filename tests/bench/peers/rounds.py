"""What was measured, round by round, and the figures that come of it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.model.config import ModelConfig
from tests.bench.models import SHAPES, read_nbytes
from tests.bench.peers.catalog import BATONS, PEERS
from tests.bench.peers.engines import Answers, Engine, Memory
from tests.bench.peers.workloads import SINGLE, Workload
from tests.bench.stats import figure, ratios, significant

MIB = 1 << 20


@dataclass
class Rounds:
    """The answers of one engine to one workload, and the read bandwidth measured right before each."""

    answers: list[Answers] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """From sending the prompts to the last token, by round."""
        return [answers.seconds for answers in self.answers]

    @property
    def ttft_s(self) -> list[float]:
        """Mean over the prompts, by round."""
        return [statistics.mean(answers.first_token_s) for answers in self.answers]

    @property
    def token_s(self) -> list[float]:
        """Time of an output token after the first one, of single streams, by round."""
        return [
            (answers.end_s[0] - answers.first_token_s[0]) / (len(answers.output_ids[0]) - 1)
            for answers in self.answers
        ]


def read_limit_s(config: ModelConfig, workload: Workload, read_gb_s: float) -> float:
    """Shortest time of a decode step of one stream, half-way through its output: weights and KV are read once."""
    context = workload.prompt_tokens + workload.output_tokens // 2
    return read_nbytes(config, context) / read_gb_s / 1e9


def workload_rows(
    model: str, config: ModelConfig, workload: Workload, measured: Mapping[str, Rounds]
) -> Iterator[dict[str, Any]]:
    """A row for each engine: medians, and for what is compared how far the rounds were apart."""
    best = best_peer({name: rounds.seconds for name, rounds in measured.items()})
    agreeing = first_token_agreement({name: rounds.answers for name, rounds in measured.items()})
    for name, rounds in measured.items():
        row: dict[str, Any] = {"bench": "peers", "model": model, "workload": workload.name, "engine": name}
        row["rounds"] = len(rounds.answers)
        row |= figure("seconds", rounds.seconds)
        row["output_tokens_s"] = _median([workload.num_outputs / s for s in rounds.seconds])
        row["ttft_ms"] = _median([1e3 * s for s in rounds.ttft_s])
        if workload.name == SINGLE:
            limits = [read_limit_s(config, workload, gb_s) for gb_s in rounds.read_gb_s]
            row["tpot_ms"] = _median([1e3 * s for s in rounds.token_s])
            row["read_gb_s"] = _median(rounds.read_gb_s)
            row |= figure("of_read_limit", ratios(limits, rounds.token_s))
        if best is not None:
            row["best_peer"] = best
            row |= figure("against_best", ratios(measured[best].seconds, rounds.seconds))
        row["first_tokens_agree"] = significant(agreeing[name], 3)
        yield row


def engine_row(
    model: str, config: ModelConfig, engine: Engine, load_s: float, loaded: Memory, kv_tokens: int
) -> dict[str, Any]:
    """Its version, and its memory beside the least that weights and KV pool take."""
    used = engine.memory()
    return {
        "bench": "peers_memory",
        "model": model,
        "engine": engine.name,
        "version": engine.version,
        "load_s": significant(load_s),
        "kv_tokens": kv_tokens,
        "kv_mib": round(kv_tokens * SHAPES[model].kv_nbytes / MIB),
        "weights_mib": round(read_nbytes(config, 0) / MIB),
        "loaded_peak_mib": round(loaded.peak / MIB),
        "peak_mib": round(used.peak / MIB),
        "proportional_mib": round(used.proportional / MIB),
    }


def best_peer(seconds: Mapping[str, Sequence[float]]) -> str | None:
    """The peer with the least median; None when none was measured."""
    peers = [name for name in seconds if name in PEERS]
    return min(peers, key=lambda name: statistics.median(seconds[name]), default=None)


def first_token_agreement(answers: Mapping[str, Sequence[Answers]]) -> dict[str, float]:
    """The share of prompts whose first token is the one that most engines give: all compute the same model.

    Of random weights the likeliest tokens are nearly tied, and bfloat16 rounds differently in each engine.
    """
    first = {
        name: [ids[0] for round_ in rounds for ids in round_.output_ids] for name, rounds in answers.items()
    }
    usual = [Counter(tokens).most_common(1)[0][0] for tokens in zip(*first.values(), strict=True)]
    return {
        name: statistics.mean(token == most for token, most in zip(tokens, usual, strict=True))
        for name, tokens in first.items()
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One node doing both (0P1D) and two (1P1D): single streams against the read limit, the least advantage over the
    best peer of any other workload, peak memory against vLLM's. The fields of what was not measured are missing.
    """
    short: dict[str, Any] = {}
    peaks = {row["engine"]: row["peak_mib"] for row in rows if row["bench"] == "peers_memory"}
    for name in BATONS:
        of_it = [row for row in rows if row["engine"] == name and row["bench"] == "peers"]
        for row in of_it:
            if "of_read_limit" in row:
                short[f"{name}_of_read_limit"] = row["of_read_limit"]
        others = {row["workload"]: row["against_best"] for row in of_it if "against_best" in row}
        others.pop(SINGLE, None)
        if others:
            short[f"{name}_least_against_best"] = min(others.values())
            short[f"{name}_against_best"] = others
        if name in peaks and "vllm" in peaks:
            short[f"{name}_memory_over_vllm"] = significant(peaks[name] / peaks["vllm"])
    return short


def _median(values: Sequence[float]) -> float:
    return significant(statistics.median(values))
