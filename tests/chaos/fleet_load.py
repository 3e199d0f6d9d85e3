"""Load from a recorded trace on a fleet of real processes, whose every answer is compared with an undisturbed one."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.bench.recorded import AZURE, load_trace, scaled
from tests.modelzoo import random_prompt

NUM_BODIES = 32
SCALE = 8
"""Lengths of the trace are divided by this."""
MAX_INPUT, MAX_OUTPUT = 300, 100
KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1.0, "sampling_seed": 7},
    {"temperature": 1.0, "sampling_seed": 8, "regex": "([a-z]{3} [0-9]{2}, ){100}"},
    {"temperature": 1.0, "sampling_seed": 9, "n": 2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
)


def bodies() -> list[dict[str, Any]]:
    """The requests of the first rows of the trace, of each kind in turn."""
    rows = itertools.islice(scaled(load_trace(AZURE), scale=SCALE), NUM_BODIES)
    return [
        {
            "input_ids": random_prompt(min(row.input_len, MAX_INPUT), seed=number),
            "stream": True,
            "sampling_params": {
                "max_new_tokens": 8 + min(row.output_len, MAX_OUTPUT),
                "ignore_eos": True,
                **KINDS[number % len(KINDS)],
            },
        }
        for number, row in enumerate(rows)
    ]


@dataclass
class Load:
    """Clients that send `bodies` in turn, and what came of it."""

    url: str
    num_clients: int = 8
    expected: list[dict[int, list[int]]] = field(default_factory=list)
    num_requests: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """The longest pause of each stream."""

    async def learn(self) -> None:
        """Send each body alone, and remember its answer as the right one."""
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
            for body in bodies():
                outputs: dict[int, list[int]] = {}
                async for event in events(client, body):
                    assert "error" not in event, event
                    outputs[event.get("index", 0)] = event["output_ids"]
                self.expected.append(outputs)

    async def run(self, seconds: float) -> None:
        """Send requests for so long, and wait for the last answers."""
        until, numbers = time.monotonic() + seconds, itertools.count()
        all_bodies = bodies()

        async def one_client() -> None:
            async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
                while time.monotonic() < until:
                    which = next(numbers) % len(all_bodies)
                    await self._check(client, all_bodies[which], which)

        await asyncio.gather(*(one_client() for _ in range(self.num_clients)))

    async def _check(self, client: httpx.AsyncClient, body: dict[str, Any], which: int) -> None:
        self.num_requests += 1
        outputs: dict[int, list[int]] = {}
        last_at, gap_s = time.monotonic(), 0.0
        try:
            async for event in events(client, body):
                if "error" in event:
                    self.failed.append(event["error"]["message"])
                    return
                now = time.monotonic()
                gap_s, last_at = max(gap_s, now - last_at), now
                index, ids = event.get("index", 0), event["output_ids"]
                if ids[: len(outputs.get(index, ()))] != outputs.get(index, []):
                    self.wrong.append(f"request {which}: a position was sent twice or changed: {ids}")
                outputs[index] = ids
        except httpx.HTTPError as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            return
        self.gaps_s.append(gap_s)
        if outputs != self.expected[which]:
            self.wrong.append(f"request {which}: {outputs} instead of {self.expected[which]}")


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream; one with `error` for an answer that is no stream."""
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            yield json.loads(await response.aread())
            return
        done = False
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])
            done = done or line == "data: [DONE]"
        if not done:
            yield {"error": {"message": "the stream ended without [DONE]"}}
