"""What is pinning a forward's threads worth, one a core, against leaving them to the kernel?

A node has other threads (scheduler, control, links), and router and clients run beside it. Each service runs with
`--cpu-cores` left out (pinned) and with `any:N`; rounds alternate between the two. `ratio` is pinned over any.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tests.bench.machine import usable_cores
from tests.bench.servers import new_client, prompt_ids, servers, stream
from tests.bench.stats import figure, percentile, ratios
from tests.bench.table import Row

VOCAB_SIZE = 4096
FLEETS = ("0P1D", "1P1D")
STREAMS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
ROUNDS = 10


def main() -> Iterator[Row]:
    """One engine on all cores, then two that share them."""
    rng = random.Random(0)
    for fleet in FLEETS:
        common = ("--local", fleet, "--max-total-tokens", "16384")
        ways = {"pinned": common, "any": (*common, "--cpu-cores", f"any:{len(usable_cores())}")}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        tails: dict[str, list[float]] = {way: [] for way in ways}
        with servers(ways) as urls:
            for i in range(ROUNDS + 1):
                for way in sorted(ways, reverse=i % 2 == 0):
                    rate, tail = asyncio.run(burst(urls[way], rng))
                    if i > 0:  # the first round warms up
                        rates[way].append(rate)
                        tails[way].append(tail)
        yield {
            "bench": "cores",
            "fleet": fleet,
            "streams": STREAMS,
            **figure("pinned_tokens_s", rates["pinned"]),
            **figure("any_tokens_s", rates["any"]),
            **figure("ratio", ratios(rates["pinned"], rates["any"])),
            **figure("pinned_itl_p99_ms", tails["pinned"]),
            **figure("any_itl_p99_ms", tails["any"]),
        }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Tokens/s pinned over any, of each fleet."""
    return {f"pinned_over_any_{row['fleet']}": row["ratio"] for row in rows}


async def burst(url: str, rng: random.Random) -> tuple[float, float]:
    """Some streams at once: output tokens a second, and the 99th percentile of the waits for a token, in ms."""
    prompts = [prompt_ids(rng, PROMPT_TOKENS, VOCAB_SIZE) for _ in range(STREAMS)]
    async with new_client() as client:
        begun = time.perf_counter()
        seen = await asyncio.gather(*(stream(client, url, ids, OUTPUT_TOKENS) for ids in prompts))
        took_s = time.perf_counter() - begun
    waits = sorted(1e3 * (b - a) for one in seen for a, b in pairwise(one.times))
    return STREAMS * OUTPUT_TOKENS / took_s, percentile(waits, 99)
