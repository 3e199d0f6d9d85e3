"""A client that reads slowly, or not at all, costs a bounded amount of memory and nobody else any time."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from router.config import ConnectionOptions
from router.http.connection import Connection, Connections
from router.http.responses import error_response
from shared.errors import RequestError
from shared.protocol.messages import Role
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import events, figure, joined_router
from tests.unit.router.raw_client import post, raw_client
from tests.unit.router.stepping_node import ROOMY, SteppingNode

HIGH_WATER_BYTES = 64 << 10
ENDLESS = 1_000_000
NUM_MISSED = 100


def request(num_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    return {"text": "a fox", "sampling_params": sampling, "stream": True}


@pytest.mark.uvloop
async def test_who_does_not_read_is_buffered_within_bounds_and_others_go_on(model_folder: Path) -> None:
    async with (
        FakeNode(Role.PREFILL, limits=ROOMY) as prefill,
        SteppingNode() as decode,
        joined_router(model_folder, [prefill, decode]) as (router, client),
        raw_client(router.http_port, buffer_bytes=1024) as stuck,
    ):
        stuck.send(post("/generate", request(ENDLESS), headers="X-SMG-Routing-Key: stuck:1:0.001\n"))
        await eventually(lambda: figure(client, "baton:http_unsent_bytes"))
        num_told = decode.num_told
        others = [client.post("/generate", json=request(50)) for _ in range(8)]
        for other in await asyncio.gather(*others):
            told = events(other.text)
            assert told[-1] == "[DONE]" and len(told[-2]["output_ids"]) == 50
        await eventually(lambda: decode.num_told >= num_told + 8 * 50 + NUM_MISSED)
        unsent = await figure(client, "baton:http_unsent_bytes")
        num_until_then = decode.num_told - 8 * 50
        await stuck.read_until(b"\r\n\r\n")
        num_seen = largest = 0
        has_missed = False
        async with asyncio.timeout(PATIENCE_S):
            async for event in stuck.chunks():
                ids = json.loads(event.removeprefix(b"data: "))["output_ids"]
                has_missed |= len(ids) >= num_seen + NUM_MISSED  # what waited has become one event
                num_seen, largest = len(ids), max(largest, len(event))
                if has_missed and num_seen >= num_until_then:
                    break
        assert ids == [decode.story[i % len(decode.story)] for i in range(len(ids))]
        assert 0 < unsent <= HIGH_WATER_BYTES + largest


# ------------------------------------------------------------------------------------ under a clock of its own
class ManualLoop(asyncio.BaseEventLoop):
    """Of a loop, what a connection's timers need."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def create_task(self, coro: Any, **_: Any) -> Any:
        """The app never gets to run."""
        coro.close()
        return self.create_future()

    def advance(self, seconds: float) -> None:
        """Timers that are due in this time run, in order."""
        end = self._now + seconds
        while self._scheduled and self._scheduled[0].when() <= end:
            handle = heapq.heappop(self._scheduled)
            self._now = handle.when()
            if not handle.cancelled():
                handle._run()
        self._now = end


class BufferedTransport(asyncio.Transport):
    """A client's end of a connection: `num_buffered` bytes are still to be taken."""

    num_buffered = 0
    aborted = closed = False

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def write(self, data: object) -> None:
        self.num_buffered += len(cast("bytes", data))

    def is_closing(self) -> bool:
        return self.aborted or self.closed

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass


@dataclass(frozen=True)
class Held:
    """A connection under a clock of its own."""

    loop: ManualLoop
    transport: BufferedTransport
    protocol: Connection

    def waits(self, num_bytes: int) -> None:
        """The app has written more than the client takes."""
        self.transport.num_buffered = num_bytes
        self.protocol.pause_writing()

    def takes_all_but(self, num_bytes: int) -> None:
        """The client has taken so much that the app may write again."""
        self.transport.num_buffered = num_bytes
        self.protocol.resume_writing()


@pytest.fixture
def held() -> Iterator[Held]:
    loop, transport = ManualLoop(), BufferedTransport()
    options = ConnectionOptions(write_timeout_s=60, header_timeout_s=10_000)
    config = Config(error_response(RequestError("no app")), log_config=None, lifespan="off", ws="none")
    connections = Connections(options, log_requests=False)
    protocol = Connection(config, ServerState(), {}, loop, connections=connections)
    protocol.connection_made(transport)
    yield Held(loop, transport, protocol)
    loop.close()


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def test_who_takes_a_little_now_and_then_is_kept(held: Held) -> None:
    held.waits(100_000)
    for _ in range(10):
        held.loop.advance(59)
        held.transport.num_buffered -= 1
    assert not held.transport.aborted
    held.loop.advance(121)
    assert held.transport.aborted


def test_who_took_all_is_kept_however_much_waits_again(held: Held) -> None:
    """Looked at twice, as much waits each time; in between the client took all of it."""
    held.protocol.data_received(GET)
    for _ in range(10):
        held.waits(65_800)
        held.loop.advance(50)
        assert not held.transport.aborted
        held.takes_all_but(0)
        held.loop.advance(5)
    held.waits(65_800)
    held.loop.advance(121)
    assert held.transport.aborted


@pytest.mark.parametrize("is_done", [False, True])
def test_what_waits_of_an_answer_is_compared_when_the_app_is_done(held: Held, is_done: bool) -> None:
    held.protocol.data_received(GET)
    held.waits(65_800)
    if is_done:
        held.protocol.cycle.response_complete = True
        held.protocol.on_response_complete()
    held.takes_all_but(500)
    held.loop.advance(121)
    assert held.transport.aborted is is_done


def test_what_is_left_of_an_answer_is_not_kept_for_ever(held: Held) -> None:
    held.protocol.data_received(b"GET / HT")
    held.loop.advance(9_999)
    assert not held.transport.closed
    held.loop.advance(2)
    assert held.transport.closed and held.transport.num_buffered > 0, "told 408"
    held.loop.advance(58)
    assert not held.transport.aborted
    held.loop.advance(62)
    assert held.transport.aborted


def test_a_body_that_has_come_is_not_waited_for(held: Held) -> None:
    held.protocol.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{")
    held.protocol.data_received(b"}")
    held.loop.advance(1_000)
    assert not held.transport.is_closing()
