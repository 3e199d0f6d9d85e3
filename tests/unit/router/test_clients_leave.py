"""Clients that leave: at every stage of an exchange, by a shutdown or a reset. Nothing of a connection stays.

Python's cycle collector is off, as good as it is in a router that serves: what it alone would free stays for hours.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import struct
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httptools
import pytest
import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.config import HttpOptions
from router.http.body import JsonRequest
from router.http.connection import MAX_HEADER_BYTES, Connection
from shared.protocol.messages import Decode, Finish, Prefill
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fake_node import FakeNode, one_then_nothing
from tests.unit.router.fakes import joined_pair, joined_router
from tests.unit.router.raw_client import CHUNKED, GENERATE, PATIENT, STREAM, RawClient, post

NUM_CLIENTS = 5
SMALL_BYTES = 4096
KINDS = (Connection, RequestResponseCycle, httptools.HttpRequestParser, JsonRequest)

Stage = Callable[[RawClient], Awaitable[None]]
"""Brings an exchange to the point where its client leaves."""


def sends(data: str | bytes) -> Stage:
    async def stage(client: RawClient) -> None:
        client.send(data)
        await asyncio.sleep(0.02)

    return stage


async def streams(client: RawClient) -> None:
    client.send(post("/generate", STREAM))
    await client.read_until(b"data: ")


async def reads_half(client: RawClient) -> None:
    """One by one: the router reads no further when it cannot write, and refuses a second request ahead."""
    for _ in range(24):
        client.send("GET /openapi.json HTTP/1.1\nHost: a\n\n")
        await asyncio.sleep(0.05)  # an answer takes less, also beside other work
    await client.read_until(b"\r\n\r\n")


async def is_answered(client: RawClient) -> None:
    client.send("GET /nowhere HTTP/1.1\nHost: a\n\n")
    assert (await client.answer()).status == 404


async def is_answered_early(client: RawClient) -> None:
    """With an answer before the body, which never ends."""
    client.send("POST /nowhere HTTP/1.1\nHost: a\nContent-Length: 10\n\n12345")
    assert (await client.answer()).status == 404


BEHIND = "with a request behind a stream"
"""uvicorn does not read then, so that a write is the first to notice."""


def is_refused(body: object) -> Stage:
    async def refused(client: RawClient) -> None:
        client.send(post("/generate", body))
        assert (await client.answer()).status == 400

    return refused


STAGES: dict[str, Stage] = {
    "before the request line": sends(""),
    "in the request line": sends("GET /heal"),
    "in the headers": sends("GET /health HTTP/1.1\nHost: a\nx: "),
    "in the body": sends("POST /generate HTTP/1.1\nHost: a\nContent-Length: 100\n\n{"),
    "in a chunk's size": sends(CHUNKED + "\n5"),
    "in a chunk": sends(CHUNKED + "\n5\n{"),
    "in the trailers": sends(CHUNKED + "\n2\n{}\n0\na: b\nc"),
    "after a body that was answered early": is_answered_early,
    "while the answer is computed": sends(post("/generate", GENERATE)),
    "while a stream is on": streams,
    BEHIND: sends(post("/generate", STREAM) + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"),
    "with half of the answer read": reads_half,
    "in keep-alive": is_answered,
    "after a body of a wrong type": is_refused({"text": 5}),
    "after a body that is no object": is_refused("no object"),
    "after a body with a wrong value": is_refused({"text": "a", "sampling_params": {"n": 1000}}),
    "after a prompt without tokens": is_refused({"input_ids": []}),
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No client may make the router, uvicorn or asyncio log a warning or a traceback."""
    yield
    loud = [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.WARNING or r.exc_info]
    assert not loud, loud


@pytest.fixture(autouse=True)
def no_cycle_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # `gc` looks at what a test makes alone, and not at every module
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@contextlib.asynccontextmanager
async def leaving(port: int, *, resets: bool) -> AsyncIterator[RawClient]:
    """A client that reads little ahead, and leaves at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=SMALL_BYTES)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    yield RawClient(reader, writer)
    if resets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def live() -> Counter[str]:
    """The parts of connections that live, reachable or not; the open files and the tasks."""
    counts = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in KINDS)
    counts["files"], counts["tasks"] = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    return counts


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
@pytest.mark.uvloop
async def test_nothing_stays_of_a_client_that_leaves(model_folder: Path, resets: bool) -> None:
    async def visit(port: int, stage: str) -> None:
        async with leaving(port, resets=resets) as client:
            await STAGES[stage](client)

    have_left = asyncio.Event()

    async def one_then_the_rest(node: FakeNode, message: Prefill | Decode) -> None:
        """What follows is computed when the clients have left."""
        node.tokens(message.key, 0, node.story[:1])
        await have_left.wait()
        node.tokens(message.key, 1, node.story[1:4], Finish("length"))

    async with joined_pair(model_folder, connections=PATIENT, wait=False) as (nodes, router, plain):
        await plain.aclose()
        await eventually(lambda: len(router.membership.all_live()) == 2)

        async def visited(num_clients: int, stage: str) -> None:
            have_left.clear()
            await asyncio.gather(*(visit(router.http_port, stage) for _ in range(num_clients)))
            have_left.set()

        for stage in STAGES:
            nodes[1].script = one_then_the_rest if stage == BEHIND else one_then_nothing
            await visited(1, stage)  # what is made once, such as the OpenAPI document
            await eventually(lambda: len(router._server.connections) == 0)
            gc.collect()
            before = live()
            await visited(NUM_CLIENTS, stage)
            await eventually(
                lambda before=before: not live() - before,
                lambda stage=stage, before=before: f"{stage}: {live() - before}",
            )
            await eventually(lambda: router._dispatcher.num_running == 0)


# ------------------------------------------------------------------------------------------- much for little
TRAILERS = b"GET /nowhere HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
LARGE = b"GET /nowhere HTTP/1.1\r\nHost: a\r\na: " + b"b" * (MAX_HEADER_BYTES - 100) + b"\r\n\r\n"
ATTACKS = {
    "trailers": TRAILERS + b"a:b\r\n" * 400_000,
    "a trailer without an end": TRAILERS + b"a:" + b"b" * 4_000_000,
    "many headers": b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 11_500 + b"\r\n",
    "a header as large as may be": LARGE,
}
KEPT_BYTES, LEFT_BYTES = 256 << 10, 16 << 10
"""The most that a client costs while it is connected, and when it is gone."""


def attacked(port: int, data: bytes) -> socket.socket:
    """A client that has sent the data, or as much of it as was taken, and the first byte of an answer, if any."""
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    with contextlib.suppress(OSError):
        client.sendall(data)
        client.recv(1)
    return client


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_client_can_make_the_router_keep(model_folder: Path, attack: str) -> None:
    """While clients are connected, and when they have left. None of them has a key."""

    async def run() -> None:
        http = HttpOptions(port=0, served_model_name="tiny", api_keys=("secret",))
        async with joined_router(model_folder, [], http=http, connections=PATIENT, wait=False) as (
            router,
            plain,
        ):
            await plain.aclose()

            async def come() -> socket.socket:
                return await asyncio.to_thread(attacked, router.http_port, ATTACKS[attack])

            (await come()).close()  # what is made once
            await eventually(lambda: len(router._server.connections) == 0)
            gc.collect()
            before, parts = traced(), live()
            with contextlib.ExitStack() as clients:
                for _ in range(NUM_CLIENTS):
                    clients.enter_context(await come())
                await eventually(
                    lambda: traced() - before < NUM_CLIENTS * KEPT_BYTES, lambda: traced() - before
                )
            await eventually(lambda: not live() - parts, lambda: live() - parts)
            await eventually(lambda: traced() - before < NUM_CLIENTS * LEFT_BYTES, lambda: traced() - before)

    tracemalloc.start()
    try:
        uvloop.run(run())
    finally:
        tracemalloc.stop()


def traced() -> int:
    """Bytes of Python's objects."""
    return tracemalloc.get_traced_memory()[0]
