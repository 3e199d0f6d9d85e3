"""Routers with their nodes in processes of their own, and streams from them whose tokens are stamped on arrival."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.processes import Router

FIRST_TEXT_TOKEN = 256
START_TIMEOUT_S = 180


@contextmanager
def servers(flags: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """A `router` with each of `flags`, all started at once, on free ports; yields their URLs when all can generate.

    Those that nobody asks anything cost next to nothing, so that rounds can alternate between them.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, ExitStack() as exits:
        started = {
            name: exits.enter_context(Router(Path(folder), *more, name=f"router-{number}"))
            for number, (name, more) in enumerate(flags.items())
        }
        for router in started.values():
            router.wait_ready(patience_s=START_TIMEOUT_S)
        yield {name: router.url for name, router in started.items()}
        for router in started.values():
            router.stop()


@dataclass
class TokenStream:
    """What has come of one streamed request. Times are seconds of `perf_counter`."""

    sent_at: float
    times: list[float] = field(default_factory=list)
    """Of each event that brought tokens."""
    output_ids: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    """`meta_info` of the last event."""

    @property
    def ttft_s(self) -> float:
        """From sending the request to its first token."""
        return self.times[0] - self.sent_at

    def gaps(self) -> list[tuple[float, float]]:
        """When each wait for the next event began, and when it was over."""
        return list(zip(self.times, self.times[1:], strict=False))


async def stream(
    client: httpx.AsyncClient,
    url: str,
    ids: Sequence[int],
    max_new_tokens: int,
    seen: TokenStream | None = None,
    rid: str | None = None,
) -> TokenStream:
    """One greedy request, streamed to its end into `seen`."""
    body = {
        "input_ids": list(ids),
        "stream": True,
        "return_timeline": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    if rid is not None:
        body["rid"] = rid
    seen = seen or TokenStream(0.0)
    seen.sent_at = time.perf_counter()
    async with client.stream("POST", f"{url}/generate", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            seen.times.append(time.perf_counter())
            last = json.loads(line[6:])
            assert "error" not in last, last
            seen.output_ids, seen.meta = last["output_ids"], last["meta_info"]
    assert seen.meta["completion_tokens"] == max_new_tokens
    return seen


def new_client() -> httpx.AsyncClient:
    """For any number of streams at once, with no time limit that a busy machine could reach."""
    return httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None))


def prompt_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """A prompt that no other request shares a prefix with."""
    return [rng.randrange(FIRST_TEXT_TOKEN, vocab_size) for _ in range(length)]
