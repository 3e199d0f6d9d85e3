"""End to end on the built-in model, over HTTP and real processes: tokens/s, TTFT, and the way of a handoff.

overlap     output tokens/s of 1 and of 32 streams, with the overlap schedule on and off
ttft        of a 1000-token prompt, cold and with its prefix cached on the prefill node
handoff     from the last chunk of a prompt computed until its first decode step begins
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.bench.servers import new_client, prompt_ids, servers, stream
from tests.bench.stats import figure, ratios
from tests.bench.table import Row

VOCAB_SIZE = 4096
ROUNDS = 4
OUTPUT_TOKENS = 128
PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 1000


async def throughput(url: str, num_streams: int, rng: random.Random) -> float:
    """Output tokens per second of `num_streams` concurrent requests."""
    prompts = [prompt_ids(rng, PROMPT_TOKENS, VOCAB_SIZE) for _ in range(num_streams)]
    async with new_client() as client:
        start = time.perf_counter()
        await asyncio.gather(*(stream(client, url, ids, OUTPUT_TOKENS) for ids in prompts))
        return num_streams * OUTPUT_TOKENS / (time.perf_counter() - start)


async def ttft(url: str, rng: random.Random) -> tuple[float, float]:
    """TTFT in seconds of a long prompt, first cold, then with all but its tail cached on the prefill node."""
    ids = prompt_ids(rng, LONG_PROMPT_TOKENS, VOCAB_SIZE)
    async with new_client() as client:
        cold = await stream(client, url, ids, 2)
        cached = await stream(client, url, ids, 2)
    assert cold.meta["cached_tokens"] == 0
    assert cached.meta["cached_tokens"] >= LONG_PROMPT_TOKENS - 32
    return cold.ttft_s, cached.ttft_s


async def handoff(url: str, rng: random.Random) -> float:
    """Seconds from the last chunk computed to the first decode step, by the nodes' own stamps."""
    async with new_client() as client:
        done = await stream(client, url, prompt_ids(rng, 400, VOCAB_SIZE), 4)
    stamps = {(s["role"], s["stage"]): s["time"] for s in done.meta["timeline"]}
    return float(stamps["decode", "decoding"] - stamps["prefill", "transferring"])


def main() -> Iterator[dict[str, Any]]:
    """Both servers run all the time; rounds alternate between them."""
    rng = random.Random(0)
    rates: dict[tuple[str, int], list[float]] = {}
    ttfts, handoffs = [], []
    with servers({"on": [], "off": ["--disable-overlap-schedule"]}) as urls:
        for url in urls.values():
            asyncio.run(throughput(url, 2, rng))
        for i in range(ROUNDS):
            for num_streams in (1, 32):
                for name in ("on", "off") if i % 2 == 0 else ("off", "on"):
                    rate = asyncio.run(throughput(urls[name], num_streams, rng))
                    rates.setdefault((name, num_streams), []).append(rate)
            ttfts += [asyncio.run(ttft(urls["on"], rng)) for _ in range(3)]
            handoffs += [asyncio.run(handoff(urls["on"], rng)) for _ in range(5)]
    for num_streams in (1, 32):
        on, off = rates["on", num_streams], rates["off", num_streams]
        yield {
            "bench": "output_tokens_per_s",
            "streams": num_streams,
            **figure("overlap_on", on),
            **figure("overlap_off", off),
            **figure("ratio", ratios(on, off)),
        }
    cold, cached = zip(*ttfts, strict=True)
    yield {
        "bench": "ttft_1000_tokens",
        **figure("cold_ms", [1e3 * s for s in cold]),
        **figure("cached_ms", [1e3 * s for s in cached]),
        **figure("ratio", ratios(cold, cached)),
    }
    yield {"bench": "last_chunk_to_first_decode_step", **figure("handoff_ms", [1e3 * s for s in handoffs])}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Tokens a second, what overlap gives, and the times of a prompt."""
    rates = {row["streams"]: row for row in rows if row["bench"] == "output_tokens_per_s"}
    ttft = next(row for row in rows if row["bench"] == "ttft_1000_tokens")
    handoff = next(row for row in rows if row["bench"] == "last_chunk_to_first_decode_step")
    return {
        **{f"tokens_s_{streams}_streams": row["overlap_on"] for streams, row in rates.items()},
        **{f"overlap_gain_{streams}_streams": row["ratio"] for streams, row in rates.items()},
        "ttft_cold_ms": ttft["cold_ms"],
        "ttft_cached_ms": ttft["cached_ms"],
        "handoff_ms": handoff["handoff_ms"],
    }
