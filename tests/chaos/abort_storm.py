"""500 requests, of which nine in ten are called off at random times; the others are as they would be alone."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.chaos.fleet_load import Load, bodies, events
from tests.modelzoo import make_model
from tests.processes import Fleet

NUM_REQUESTS, NUM_KEPT = 500, 50
WITHIN_S = 20.0


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

        async def one(client: httpx.AsyncClient, number: int) -> None:
            which = number % len(all_bodies)
            await asyncio.sleep(rng.uniform(0, WITHIN_S))
            outputs: dict[int, list[int]] = {}
            async for event in events(client, {**all_bodies[which], "rid": f"storm-{number}"}):
                assert "error" not in event, event
                outputs[event.get("index", 0)] = event["output_ids"]
            if number in kept and outputs != load.expected[which]:
                wrong.append(number)

        async def called_off(client: httpx.AsyncClient, number: int) -> None:
            running = asyncio.create_task(one(client, number))
            await asyncio.sleep(rng.uniform(0, 1.2 * WITHIN_S))
            if number % 2:
                await client.post("/abort_request", json={"rid": f"storm-{number}"})
                await running
            else:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        async def storm() -> None:
            await load.learn()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=fleet.router.url, timeout=None, limits=limits) as client:
                await asyncio.gather(
                    *((one if n in kept else called_off)(client, n) for n in range(num_requests))
                )

        asyncio.run(storm())
        fleet.router.wait_home()
        yield {"requests": num_requests, "kept": len(kept), "wrong": len(wrong)}
        assert not wrong, wrong
        fleet.stop()
