"""End to end on the built-in model, over HTTP and real processes: tokens/s, TTFT, and the way of a handoff.

overlap     output tokens/s of 1 and of 32 streams, with the overlap schedule on and off, in alternating servers
ttft        of a 1000-token prompt, cold and with its prefix cached on the prefill node
handoff     from the last chunk of a prompt computed until its first decode step begins
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from tests.bench.table import Row

VOCAB_SIZE = 4096
ROUNDS = 2
OUTPUT_TOKENS = 128
PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 1000


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """`router --local` with the built-in model on free ports; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "router", "--port", str(port), "--control-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def healthy(url: str) -> bool:
    """Whether the server can generate."""
    try:
        return httpx.get(f"{url}/health_generate", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def prompt_ids(rng: random.Random, length: int) -> list[int]:
    """A prompt that no other request shares a prefix with."""
    return [rng.randrange(256, VOCAB_SIZE) for _ in range(length)]


async def stream(client: httpx.AsyncClient, url: str, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    """One streamed request: its TTFT, its end, its meta_info."""
    body = {
        "input_ids": ids,
        "stream": True,
        "return_timeline": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    start = time.perf_counter()
    ttft_s, last = None, {}
    async with client.stream("POST", f"{url}/generate", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line[6:])
            assert "error" not in last, last
            if ttft_s is None:
                ttft_s = time.perf_counter() - start
    meta = last["meta_info"]
    assert meta["completion_tokens"] == max_new_tokens
    return {"ttft_s": ttft_s, "meta": meta}


async def throughput(url: str, num_streams: int, rng: random.Random) -> float:
    """Output tokens per second of `num_streams` concurrent requests."""
    prompts = [prompt_ids(rng, PROMPT_TOKENS) for _ in range(num_streams)]
    async with httpx.AsyncClient(timeout=300) as client:
        start = time.perf_counter()
        await asyncio.gather(*(stream(client, url, ids, OUTPUT_TOKENS) for ids in prompts))
        return num_streams * OUTPUT_TOKENS / (time.perf_counter() - start)


async def ttft(url: str, rng: random.Random) -> tuple[float, float]:
    """TTFT in seconds of a long prompt, first cold, then with all but its tail cached on the prefill node."""
    ids = prompt_ids(rng, LONG_PROMPT_TOKENS)
    async with httpx.AsyncClient(timeout=300) as client:
        cold = await stream(client, url, ids, 2)
        cached = await stream(client, url, ids, 2)
    assert cold["meta"]["cached_tokens"] == 0
    assert cached["meta"]["cached_tokens"] >= LONG_PROMPT_TOKENS - 32
    return cold["ttft_s"], cached["ttft_s"]


async def handoff(url: str, rng: random.Random) -> float:
    """Seconds from the last chunk computed to the first decode step, by the nodes' own stamps."""
    async with httpx.AsyncClient(timeout=300) as client:
        done = await stream(client, url, prompt_ids(rng, 400), 4)
    stamps = {(s["role"], s["stage"]): s["time"] for s in done["meta"]["timeline"]}
    return float(stamps["decode", "decoding"] - stamps["prefill", "transferring"])


def main() -> list[dict[str, Any]]:
    """Run everything and return the figures."""
    rng = random.Random(0)
    rates: dict[tuple[str, int], list[float]] = {}
    ttfts, handoffs = [], []
    for _ in range(ROUNDS):
        for name, flags in (("on", []), ("off", ["--disable-overlap-schedule"])):
            with server(*flags) as url:
                asyncio.run(throughput(url, 2, rng))
                for num_streams in (1, 32):
                    rate = asyncio.run(throughput(url, num_streams, rng))
                    rates.setdefault((name, num_streams), []).append(rate)
                if name == "on":
                    ttfts += [asyncio.run(ttft(url, rng)) for _ in range(3)]
                    handoffs += [asyncio.run(handoff(url, rng)) for _ in range(5)]
    figures: list[dict[str, Any]] = []
    for num_streams in (1, 32):
        on, off = rates["on", num_streams], rates["off", num_streams]
        figures.append(
            {
                "bench": "output_tokens_per_s",
                "streams": num_streams,
                "overlap_on": round(statistics.median(on), 1),
                "overlap_off": round(statistics.median(off), 1),
                "ratio": round(statistics.median(on) / statistics.median(off), 3),
                "spread_on": [round(min(on), 1), round(max(on), 1)],
                "spread_off": [round(min(off), 1), round(max(off), 1)],
            }
        )
    cold, cached = (statistics.median(values) for values in zip(*ttfts, strict=True))
    figures.append(
        {
            "bench": "ttft_1000_tokens",
            "cold_ms": round(cold * 1e3, 1),
            "cached_ms": round(cached * 1e3, 1),
            "ratio": round(cold / cached, 2),
        }
    )
    figures.append(
        {
            "bench": "last_chunk_to_first_decode_step",
            "median_ms": round(statistics.median(handoffs) * 1e3, 2),
            "max_ms": round(max(handoffs) * 1e3, 2),
            "samples": len(handoffs),
        }
    )
    return figures


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
        "handoff_ms": handoff["median_ms"],
    }
