"""What does a prefill do to the streams that are running? 1P1D against one node doing both, on the same cores.

The model has the shape of llama-160m, large enough that a prompt of 2048 tokens takes a while. Some streams
run; then long prompts come, one after the other. What counts is every gap between two events of a running stream that
lies, in part at least, between the sending of a long prompt and its second token, for which its KV has to have moved.

    itl_p50_ms, itl_p99_ms, itl_max_ms   of those gaps, which are few and long where the streams stand still
    quiet_p50_ms                         of the other gaps: a step with nothing beside it
    ttft_ms                              of the long prompts
    p99_ratio                            p99 of this fleet over that of 1P1D in the same round

All fleets run all the time, and rounds alternate between them; local mode gives a single node all cores, and each of
two nodes half of them. `--enable-mixed-chunk` is what a single node can do about it: chunks of the prompt and steps
of the streams share forwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.bench.models import VOCAB_SIZE, random_model
from tests.bench.servers import TokenStream, new_client, prompt_ids, servers, stream
from tests.bench.stats import figure, percentile, ratios
from tests.bench.table import Row

MODEL = "llama-160m"
SPLIT, UNSPLIT, MIXED = "1P1D", "0P1D", "0P1D, mixed chunks"
FLEETS = {
    SPLIT: ["--local", "1P1D"],
    UNSPLIT: ["--local", "0P1D"],
    MIXED: ["--local", "0P1D", "--enable-mixed-chunk"],
}
FLAGS = ["--max-total-tokens", "24576"]
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Streams that run, and long prompts that come one after the other."""

    num_streams: int = 8
    stream_prompt_tokens: int = 64
    stream_output_tokens: int = 2000
    num_long: int = 3
    long_prompt_tokens: int = 2048
    long_output_tokens: int = 2
    vocab_size: int = VOCAB_SIZE
    pause_s: float = 0.5


MIX = Mix()


@dataclass
class Seen:
    """Milliseconds, of one round on one fleet."""

    beside: list[float] = field(default_factory=list)
    """Gaps that lie beside a long prompt's prefill."""
    quiet: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, streams: Sequence[TokenStream], long: Sequence[TokenStream]) -> Seen:
        """Sort the streams' gaps by whether they overlap the prefill of one of `long`."""
        seen = cls(ttfts=[1e3 * one.ttft_s for one in long])
        windows = [(one.sent_at, one.times[-1]) for one in long]
        for running in streams:
            for begin, end in running.gaps():
                beside = any(begin < last and end > sent for sent, last in windows)
                (seen.beside if beside else seen.quiet).append(1e3 * (end - begin))
        return seen

    @property
    def p99(self) -> float:
        """Of the gaps beside a prefill."""
        return percentile(sorted(self.beside), 99)


async def play(url: str, rng: random.Random, mix: Mix = MIX) -> Seen:
    """One round."""
    async with new_client() as client:
        running = [TokenStream(0.0) for _ in range(mix.num_streams)]
        tasks = [asyncio.create_task(_run(client, url, rng, mix, seen)) for seen in running]
        while not all(seen.times for seen in running):
            await asyncio.sleep(0.05)
        long = []
        for _ in range(mix.num_long):
            await asyncio.sleep(mix.pause_s)
            ids = prompt_ids(rng, mix.long_prompt_tokens, mix.vocab_size)
            long.append(await stream(client, url, ids, mix.long_output_tokens))
        await asyncio.sleep(mix.pause_s)
        assert not any(task.done() for task in tasks), (
            "a stream ended too early to see what a prefill does to it"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Seen.of(running, long)


async def _run(client: httpx.AsyncClient, url: str, rng: random.Random, mix: Mix, seen: TokenStream) -> None:
    ids = prompt_ids(rng, mix.stream_prompt_tokens, mix.vocab_size)
    await stream(client, url, ids, mix.stream_output_tokens, seen)


def main() -> Iterator[dict[str, Any]]:
    """A row for each fleet."""
    model = ["--model", str(random_model(MODEL)), *FLAGS]
    rounds: dict[str, list[Seen]] = {name: [] for name in FLEETS}
    rng = random.Random(0)
    with servers({name: [*model, *flags] for name, flags in FLEETS.items()}) as urls:
        for i in range(ROUNDS):
            for name in list(FLEETS) if i % 2 == 0 else list(FLEETS)[::-1]:
                rounds[name].append(asyncio.run(play(urls[name], rng)))
    split_p99s = [seen.p99 for seen in rounds[SPLIT]]
    for name, seen in rounds.items():
        yield row(name, seen, split_p99s)


def row(name: str, seen: Sequence[Seen], split_p99s: Sequence[float]) -> dict[str, Any]:
    """Of all rounds of one fleet."""
    beside = sorted(gap for one in seen for gap in one.beside)
    quiet = sorted(gap for one in seen for gap in one.quiet)
    return {
        "bench": "interference",
        "fleet": name,
        "streams": MIX.num_streams,
        "gaps": len(beside),
        **figure("itl_p50_ms", [percentile(sorted(one.beside), 50) for one in seen]),
        **figure("itl_p99_ms", [one.p99 for one in seen]),
        "itl_max_ms": round(beside[-1], 1),
        "quiet_p50_ms": round(percentile(quiet, 50), 2),
        **figure("ttft_ms", [ttft for one in seen for ttft in one.ttfts]),
        **figure("p99_ratio", ratios([one.p99 for one in seen], split_p99s)),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How many times lower 1P1D keeps the p99."""
    by_fleet = {row["fleet"]: row for row in rows}
    return {
        "split_itl_p99_ms": by_fleet[SPLIT]["itl_p99_ms"],
        "unsplit_itl_p99_ms": by_fleet[UNSPLIT]["itl_p99_ms"],
        "mixed_itl_p99_ms": by_fleet[MIXED]["itl_p99_ms"],
        "unsplit_over_split": by_fleet[UNSPLIT]["p99_ratio"],
        "mixed_over_split": by_fleet[MIXED]["p99_ratio"],
    }
