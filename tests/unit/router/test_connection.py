"""One connection on a transport in memory, where it is certain what comes in one piece and when writing is paused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.config import ConnectionOptions
from router.http.connection import MAX_HEADER_BYTES, MAX_PIPELINED_HEADERS, Connection, Connections
from router.http.connections import on_connections
from tests.patience import eventually

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class MemoryTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 1

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Scene:
    """A connection whose app answers with a stream of events that has no end, when `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.transport = MemoryTransport()
        config = uvicorn.Config(on_connections(self._app), log_config=None, lifespan="off", ws="none")
        connections = Connections(ConnectionOptions(), log_requests=False)
        self.connection = Connection(config, ServerState(), {}, connections=connections)
        self.connection.connection_made(self.transport)

    async def _app(self, _: Scope, __: Receive, send: Send) -> None:
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()


@pytest.mark.uvloop
async def test_no_probe_comes_in_front_of_a_status_line_that_waits() -> None:
    scene = Scene()
    scene.connection.data_received(REQUEST)
    scene.connection.pause_writing()  # for an answer before
    assert scene.connection.eof_received()
    scene.go_on.set()
    await asyncio.sleep(0.01)
    scene.connection.resume_writing()
    scene.connection._probe(600)  # its timer ends before the app's turn
    assert scene.transport.written == b""
    await eventually(lambda: scene.transport.written.startswith(b"HTTP/1.1 200 OK"))
    scene.connection._cancel_client_timer()
    scene.connection._probe(600)
    assert scene.transport.written.endswith(b"\r\n\r\n3\r\n:\n\n\r\n")
    scene.connection.connection_lost(None)


@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize(
    ("fields", "num_requests"),
    [
        (b"x: " + b"y" * (MAX_HEADER_BYTES // 4) + b"\r\n", 4),
        (b"x: y\r\n" * 90, MAX_PIPELINED_HEADERS // 90 + 1),
    ],
    ids=["bytes", "headers"],
)
@pytest.mark.uvloop
async def test_requests_that_wait_are_bounded_by_their_headers(
    fields: bytes, num_requests: int, trailers: bool
) -> None:
    waits = REQUEST[:-2] + fields + b"\r\n"
    if trailers:
        waits = REQUEST[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + fields + b"\r\n"
    scene = Scene()
    scene.connection.data_received(REQUEST)
    await asyncio.sleep(0.01)
    scene.connection.data_received(waits * (num_requests - 1))
    assert not scene.transport.closed
    scene.connection.data_received(waits + trailers * REQUEST)
    assert scene.transport.closed
    scene.connection.connection_lost(None)
