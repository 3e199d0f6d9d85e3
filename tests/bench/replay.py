"""Replays requests to a fleet over HTTP at their times, with a client that costs next to nothing.

It reads no event but the last of each stream: the cores that it takes are missing in the fleet that it measures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
import uvloop

from planner.figures import Served
from planner.traffic.trace import SimRequest
from tests.bench.servers import FIRST_TEXT_TOKEN

LEAD_S = 0.5
"""From the start of a replay to the time 0 of its requests."""


@dataclass(kw_only=True)
class Replayed:
    """What came of a replay."""

    served: dict[int, Served] = field(default_factory=dict)
    """By the place of the request among those that were sent."""
    failed: list[str] = field(default_factory=list)
    """What was answered instead."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Both of those that were served."""
    late_s: float = 0.0
    """How much later than it should a request was sent, at most: the client had no core."""
    cpu_share: float = 0.0
    """Of all cores, taken by the fleet and the client together."""
    load: float = 0.0
    """Processes that ran or waited for a core in the last minute of the replay, those of others included."""

    @property
    def cached_share(self) -> float:
        """Of prompt tokens."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)


def replay(
    port: int, requests: Sequence[SimRequest], processes: Sequence[psutil.Process], vocab_size: int
) -> Replayed:
    """Send every request at its time, whatever has become of those before. `processes` are the fleet's."""
    bodies = [_http(port, ids, request.output_len) for ids, request in _prompts(requests, vocab_size)]
    everyone = [*processes, psutil.Process()]
    began, before_s = time.perf_counter(), _cpu_s(everyone)
    seen = uvloop.run(_send_all(port, requests, bodies))
    cpu_s, wall_s = _cpu_s(everyone) - before_s, time.perf_counter() - began
    seen.load = os.getloadavg()[0]
    seen.cpu_share = cpu_s / wall_s / (psutil.cpu_count() or 1)
    return seen


def _prompts(requests: Sequence[SimRequest], vocab_size: int) -> Iterator[tuple[list[int], SimRequest]]:
    """Random tokens. Equal blocks have equal tokens."""
    for request in requests:
        ids: list[int] = []
        for block in request.blocks:
            draw = random.Random(block).randrange
            ids += [draw(FIRST_TEXT_TOKEN, vocab_size) for _ in range(request.block_tokens)]
        yield ids[: request.input_len], request


def _http(port: int, ids: Sequence[int], max_new_tokens: int) -> bytes:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": list(ids), "stream": True, "sampling_params": sampling}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Stream(asyncio.Protocol):
    """One request on a connection of its own. `over` is done when that is closed."""

    def __init__(self, request: bytes, over: asyncio.Future[None]) -> None:
        self.sent_at = time.perf_counter()
        self.first_at = self.last_at = 0.0
        self.answer = bytearray()
        self._request = request
        self._over = over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.answer += data
        self.last_at = time.perf_counter()
        if not self.first_at and b"data: {" in self.answer:
            self.first_at = self.last_at

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set_result(None)

    @property
    def last_event(self) -> dict[str, Any] | None:
        """None if the stream did not end as it should."""
        begin = self.answer.rfind(b"data: {")
        if begin < 0 or b"data: [DONE]" not in self.answer[begin:]:
            return None
        event: dict[str, Any] = json.loads(self.answer[begin + 6 :].split(b"\n", 1)[0])
        return None if "error" in event else event


async def _send_all(port: int, requests: Sequence[SimRequest], bodies: Sequence[bytes]) -> Replayed:
    loop, seen = asyncio.get_running_loop(), Replayed()
    start = loop.time() + LEAD_S

    async def send(place: int, request: SimRequest, body: bytes) -> None:
        over = loop.create_future()
        await asyncio.sleep(start + request.at_s - loop.time())
        seen.late_s = max(seen.late_s, loop.time() - start - request.at_s)
        _, stream = await loop.create_connection(lambda: _Stream(body, over), "127.0.0.1", port)
        await over
        event = stream.last_event
        if event is None or event["meta_info"]["completion_tokens"] != request.output_len:
            seen.failed.append(stream.answer[-200:].decode(errors="replace"))
            return
        seen.num_prompt_tokens += event["meta_info"]["prompt_tokens"]
        seen.num_cached_tokens += event["meta_info"]["cached_tokens"]
        ttft_s, e2e_s = stream.first_at - stream.sent_at, stream.last_at - stream.sent_at
        seen.served[place] = Served(ttft_s=ttft_s, e2e_s=e2e_s, num_tokens=request.output_len)

    await asyncio.gather(*map(send, itertools.count(), requests, bodies))
    return seen


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
