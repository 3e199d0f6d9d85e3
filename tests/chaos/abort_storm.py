"""500 requests, of which nine in ten are called off in the middle; the others are as they would be alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.chaos.fleet_load import Load, bodies, events
from tests.modelzoo import make_model
from tests.processes import Fleet

NUM_REQUESTS, NUM_KEPT = 500, 50
WITHIN_S = 5.0
MOST_EVENTS, LONG = 5, 500
"""A request that is called off wants LONG tokens, and is called off after at most MOST_EVENTS events."""


def run(num_requests: int = NUM_REQUESTS) -> Iterator[dict[str, object]]:
    """Every second request that is called off is aborted by its rid; the client of the others hangs up."""
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        yield from _run(Path(folder), num_requests)


def _run(folder: Path, num_requests: int) -> Iterator[dict[str, object]]:
    rng = random.Random(5)
    model = make_model(folder / "model", "llama")
    flags = ("--page-size", "4", "--max-total-tokens", "4096")
    with Fleet(folder / "logs", model, "2P2D", flags=flags) as fleet:
        load, all_bodies = Load(fleet.router.url), bodies()
        kept = set(rng.sample(range(num_requests), num_requests * NUM_KEPT // NUM_REQUESTS))
        wrong: list[int] = []
        cut_short: set[int] = set()
        """Requests that were called off before they had all tokens."""

        async def one(client: httpx.AsyncClient, number: int) -> None:
            await asyncio.sleep(rng.uniform(0, WITHIN_S))
            which, rid = number % len(all_bodies), f"storm-{number}"
            body = {**all_bodies[which], "rid": rid}
            off_at = None if number in kept else rng.randint(1, MOST_EVENTS)
            if off_at is not None:
                body["sampling_params"] = {**body["sampling_params"], "max_new_tokens": LONG}
            outputs: dict[int, list[int]] = {}
            num_events = 0
            async with contextlib.aclosing(events(client, body)) as stream:
                async for event in stream:
                    assert "error" not in event, event
                    outputs[event.get("index", 0)] = event["output_ids"]
                    num_events += 1
                    if num_events == off_at and number % 2:
                        await client.post("/abort_request", json={"rid": rid})
                    elif num_events == off_at:
                        break
            for index, expected in load.expected[which].items():
                output = outputs.get(index, [])
                length = len(output) if off_at is not None else len(expected)
                if output[: len(expected)] != expected[:length]:
                    wrong.append(number)
            if off_at is not None and max(map(len, outputs.values())) < LONG:
                cut_short.add(number)

        async def storm() -> None:
            await load.learn()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=fleet.router.url, timeout=None, limits=limits) as client:
                await asyncio.gather(*(one(client, number) for number in range(num_requests)))

        asyncio.run(storm())
        fleet.router.wait_home()
        yield {
            "requests": num_requests,
            "kept": len(kept),
            "called off in the middle": len(cut_short),
            "wrong": len(wrong),
        }
        assert not wrong, wrong
        assert len(cut_short) == num_requests - len(kept), "some had ended before they were called off"
        fleet.stop()
