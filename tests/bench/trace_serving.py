"""How does a fleet serve a recorded workload? Arrivals and lengths of Azure's conversation trace, built-in model.

Lengths are divided by SCALE, since the built-in model's context is 2048 tokens. Each rate replays the same requests,
so many times as fast as they were recorded, on 1P1D and on one node doing both, with the cores that the machine has.
Rounds alternate between the fleets, which run all the time.

    ttft, itl            time to first token, and between two events of a stream, over all requests
    output_tokens_s      from the first arrival to the last token
    goodput              share of the requests with TTFT and mean time between tokens within TTFT_S and TPOT_S
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from planner.traffic.trace import SimRequest
from tests.bench.devices import CONTEXT_LENGTH
from tests.bench.recorded import AZURE, load_trace, scaled
from tests.bench.servers import TokenStream, new_client, prompt_ids, servers, stream
from tests.bench.stats import figure, percentile
from tests.bench.table import Row
from tests.bench.timed_stream import VOCAB_SIZE

SCALE = 4
NUM_REQUESTS = 48
RATES = (2.0, 6.0)
ROUNDS = 2
TTFT_S, TPOT_S = 0.5, 0.05
FLEETS = {"1P1D": ["--local", "1P1D"], "0P1D": ["--local", "0P1D"]}


def workload(rate: float) -> list[SimRequest]:
    """The first requests of the trace, `rate` times as fast."""
    requests = list(itertools.islice(scaled(load_trace(AZURE), scale=SCALE, rate=rate), NUM_REQUESTS))
    assert all(request.input_len + request.output_len <= CONTEXT_LENGTH for request in requests)
    return requests


async def replay(url: str, requests: Sequence[SimRequest], rng: random.Random) -> list[TokenStream]:
    """Every request at its time, whatever has become of those before."""
    async with new_client() as client:
        return await asyncio.gather(*(_one(client, url, request, rng) for request in requests))


async def _one(client: httpx.AsyncClient, url: str, request: SimRequest, rng: random.Random) -> TokenStream:
    ids = prompt_ids(rng, request.input_len, VOCAB_SIZE)
    await asyncio.sleep(request.at_s)
    return await stream(client, url, ids, request.output_len)


def main() -> Iterator[dict[str, Any]]:
    """A row for each rate and fleet."""
    rng = random.Random(0)
    with servers(FLEETS) as urls:
        for rate in RATES:
            requests = workload(rate)
            rounds: dict[str, list[list[TokenStream]]] = {name: [] for name in FLEETS}
            for i in range(ROUNDS):
                for name in list(FLEETS) if i % 2 == 0 else list(FLEETS)[::-1]:
                    rounds[name].append(asyncio.run(replay(urls[name], requests, rng)))
            for name, seen in rounds.items():
                yield row(name, rate, seen)


def row(fleet: str, rate: float, rounds: Sequence[Sequence[TokenStream]]) -> dict[str, Any]:
    """What several replays of one workload came to: the figure of each, and their median."""
    return {
        "bench": "trace",
        "fleet": fleet,
        "times_recorded_rate": rate,
        "requests": len(rounds[0]),
        **figure("ttft_p50_ms", [1e3 * percentile(ttfts(seen), 50) for seen in rounds]),
        **figure("ttft_p99_ms", [1e3 * percentile(ttfts(seen), 99) for seen in rounds]),
        **figure("itl_p50_ms", [1e3 * percentile(itls(seen), 50) for seen in rounds]),
        **figure("itl_p99_ms", [1e3 * percentile(itls(seen), 99) for seen in rounds]),
        **figure("output_tokens_s", [output_tokens_s(seen) for seen in rounds]),
        **figure("goodput", [statistics.mean(is_good(one) for one in seen) for seen in rounds]),
    }


def ttfts(streams: Sequence[TokenStream]) -> list[float]:
    """Sorted, seconds."""
    return sorted(one.ttft_s for one in streams)


def itls(streams: Sequence[TokenStream]) -> list[float]:
    """Sorted, seconds, of all streams together."""
    return sorted(end - begin for one in streams for begin, end in one.gaps())


def output_tokens_s(streams: Sequence[TokenStream]) -> float:
    """From the first request sent to the last token."""
    num_tokens = sum(one.meta["completion_tokens"] for one in streams)
    return float(num_tokens / (max(one.times[-1] for one in streams) - min(one.sent_at for one in streams)))


def is_good(one: TokenStream) -> bool:
    """Within both bounds."""
    after_first = one.meta["completion_tokens"] - 1
    tpot_s = (one.times[-1] - one.times[0]) / after_first if after_first else 0.0
    return one.ttft_s <= TTFT_S and tpot_s <= TPOT_S


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """TTFT and ITL of each fleet at the highest rate."""
    busiest = [row for row in rows if row["times_recorded_rate"] == max(RATES)]
    names = ("ttft_p99_ms", "itl_p99_ms", "output_tokens_s", "goodput")
    return {f"{row['fleet']} {name}": row[name] for row in busiest for name in names}
