"""What a client sees of long prompts beside running streams: 1P1D on one GPU against one node that does both.

A gap between two events of a stream counts as beside a prefill if the gap overlaps the time from the sending of a
long prompt until its second token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.bench.interference import FLEETS, SPLIT, UNSPLIT, Mix, Seen, play
from tests.bench.servers import servers
from tests.bench.stats import percentile
from tests.gpu.rows import figure
from tests.gpu.shapes import dummy_model
from tests.gpu.steps import Place, Report

ROUNDS = 2
MIX = Mix(num_streams=32, stream_prompt_tokens=256, stream_output_tokens=3000, long_prompt_tokens=8192)
DRY_MIX = Mix(
    num_streams=2,
    stream_prompt_tokens=16,
    stream_output_tokens=900,
    num_long=1,
    long_prompt_tokens=64,
    pause_s=0.1,
)
"""A dry run's contexts end the streams soon."""
POOL_TOKENS = 140_000
NAMES = (SPLIT, UNSPLIT)
SHARE = "0.3"
"""Of the GPU for each of the three nodes."""
CHUNK = "2048"
DRY_POOL_TOKENS = 8192
ROOMY_GIB = 120
"""Three nodes with an 8B and such pools need so much; on a smaller GPU they have a 0.6B."""


def memory_gib() -> float:
    """Of the GPU."""
    return float(torch.cuda.mem_get_info()[1]) / 2**30


def run(place: Place, report: Report) -> None:
    """All fleets at once, and rounds that alternate between them; those that serve nothing cost next to nothing."""
    model = dummy_model(place, "8b" if place.is_dry or memory_gib() > ROOMY_GIB else "0.6b")
    report(figure("model", model.name))
    mix, pool = (DRY_MIX, DRY_POOL_TOKENS) if place.is_dry else (MIX, POOL_TOKENS)
    mix = replace(mix, vocab_size=model.shape.vocab_size)
    flags = [*model.flags, "--device", place.device, "--max-total-tokens", str(pool)]
    flags += ["--mem-fraction-static", SHARE, "--chunked-prefill-size", CHUNK]
    rng, rounds = random.Random(0), {name: list[Seen]() for name in NAMES}
    try:
        with servers({name: [*flags, *FLEETS[name]] for name in NAMES}) as urls:
            for i in range(1 if place.is_dry else ROUNDS):
                for name in NAMES if i % 2 == 0 else NAMES[::-1]:
                    rounds[name].append(asyncio.run(play(urls[name], rng, mix)))
    finally:  # a step whose time is over reports the rounds that it has seen
        for name, seen in rounds.items():
            if seen:
                report_rounds(report, name, seen, mix)


def report_rounds(report: Report, name: str, rounds: Sequence[Seen], mix: Mix) -> None:
    """Two rows for a fleet."""
    beside = sorted(gap for one in rounds for gap in one.beside)
    quiet = sorted(gap for one in rounds for gap in one.quiet)
    ttfts = sorted(ttft for one in rounds for ttft in one.ttfts)
    note = f"p50 {percentile(beside, 50):.2f}, most {beside[-1]:.1f}; quiet p50 {percentile(quiet, 50):.2f}"
    report(
        figure(
            f"{name}: ITL p99 beside a prefill", percentile(beside, 99), "ms", note=note, rounds=len(rounds)
        )
    )
    report(figure(f"{name}: TTFT of {mix.long_prompt_tokens} tokens", percentile(ttfts, 50), "ms"))
