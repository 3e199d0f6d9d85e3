"""Connections of slow, odd and hostile clients: each gets the right status or is closed, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from router.config import ConnectionOptions, HttpLimits, HttpOptions
from router.http.connection import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    NUM_SPARE_CONNECTIONS,
)
from shared.protocol.messages import Cancel, Decode, Finish
from tests.patience import eventually
from tests.unit.router.fake_node import FakeNode, one_then_nothing
from tests.unit.router.fakes import joined_pair
from tests.unit.router.raw_client import CHUNKED, GENERATE, PATIENT, STREAM, RawClient, post, raw_client

HEALTH = "GET /health HTTP/1.1\nHost: a\n\n"
MAX_BODY_BYTES = 4000
PIECES = (1 << 20, 700)
"""All at once, and in pieces of so many bytes."""

pytestmark = [pytest.mark.uvloop, pytest.mark.usefixtures("quiet")]


@contextlib.asynccontextmanager
async def playing(
    model_folder: Path, options: ConnectionOptions = PATIENT, *, log_requests: bool = False, **scripts: object
) -> AsyncIterator[tuple[int, FakeNode]]:
    """A router's port and its decode node. No sequence, task or open file may be left in the router afterwards."""
    limits = HttpLimits(max_body_bytes=MAX_BODY_BYTES)
    http = HttpOptions(port=0, served_model_name="tiny", limits=limits, log_requests=log_requests)
    async with joined_pair(model_folder, **scripts, http=http, connections=options) as (
        nodes,
        router,
        client,
    ):
        await client.aclose()
        await asyncio.sleep(0.05)
        before = held()
        yield router.http_port, nodes[1]
        await eventually(lambda: not any(now > then for now, then in zip(held(), before, strict=True)))
        assert router._dispatcher.num_running == 0


def held() -> tuple[int, int]:
    """Open files, and tasks."""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


@contextlib.asynccontextmanager
async def streaming(port: int) -> AsyncIterator[RawClient]:
    """A client that has had the first event of a stream."""
    async with raw_client(port) as client:
        client.send(post("/generate", STREAM))
        assert b" 200 " in await client.read_until(b"\n")
        await client.read_until(b"data: ")
        yield client


# ------------------------------------------------------------------------------------------ conversations
class Then(enum.Enum):
    """What a client does or sees beside what it sends and the statuses that it gets."""

    WAITS = "for a moment"
    ENDS = "its half of the connection"
    CLOSED = "by the router, without another word"


@dataclass(frozen=True)
class Pieces:
    """Sent so many bytes at a time."""

    data: str
    num_bytes: int


Step = str | bytes | Pieces | int | Then
"""What the client sends, or the status of the next answer."""
TYPES = {400: "invalid_request_error", 408: "timeout_error", 413: "request_too_large"}


async def converse(port: int, *steps: Step) -> None:
    """A connection goes so. Every answer has the id of its request, and says what is wrong in the one shape."""
    async with raw_client(port) as client:
        named = any("X-Request-Id: mine" in str(step) for step in steps)
        for step, following in itertools.pairwise((*steps, None)):
            match step:
                case str() | bytes():
                    client.send(step)
                case Pieces(data, num_bytes):
                    await client.send_in_pieces(data, num_bytes)
                case Then.WAITS:
                    await asyncio.sleep(0.05)
                case Then.ENDS:
                    client.writer.write_eof()
                case Then.CLOSED:
                    assert await client.closed() == b"", steps
                case int():
                    answer = await client.answer()
                    assert answer.status == step, (answer, steps)
                    if step == 100:
                        continue
                    request_id = answer.headers["x-request-id"]
                    assert request_id == "mine" if named else len(request_id) == 32
                    assert step not in TYPES or answer.error["type"] == TYPES[step]
                    if following is Then.CLOSED and step >= 400:
                        assert answer.headers["connection"] == "close", steps


TOO_SLOW: list[tuple[dict[str, float], list[list[Step]]]] = [
    (
        {"header_timeout_s": 2},
        [
            [Then.CLOSED],
            ["GET /health HTTP/1.1\n", *[Then.WAITS, "a: b\n"] * 4, 408, Then.CLOSED],  # it trickles
            [HEALTH, 200, "GET /health HTTP/1.1\n", 408, Then.CLOSED],
        ],
    ),
    (
        {"body_timeout_s": 0.2},
        [
            *(
                [
                    f"POST {path} HTTP/1.1\nHost: a\nX-Request-Id: mine\nContent-Length: 100\n\n{{",
                    408,
                    Then.CLOSED,
                ]
                for path in ("/generate", "/v1/chat/completions", "/tokenize")
            ),
            # A body after its answer cannot hold the connection.
            [
                f"POST /generate HTTP/1.1\nHost: a\nContent-Length: {MAX_BODY_BYTES + 1}\n\n",
                413,
                "x",
                Then.CLOSED,
            ],
        ],
    ),
    ({"keep_alive_timeout_s": 1}, [[HEALTH, 200, Then.CLOSED]]),
]


@pytest.mark.parametrize(("options", "conversations"), TOO_SLOW, ids=lambda part: str(part)[:25])
async def test_what_comes_too_slowly(
    model_folder: Path, options: dict[str, float], conversations: list[list[Step]]
) -> None:
    async with playing(model_folder, replace(PATIENT, **options)) as (port, _):
        await asyncio.gather(*(converse(port, *steps) for steps in conversations))


NAME = "x" * 5 * MAX_HEADER_BYTES
OFFER = "Host: a\nConnection: Upgrade\nUpgrade: h2c"
SMUGGLED = f"GET /health HTTP/1.1\n{OFFER}\nContent-Length: {len(HEALTH) + 3}\n\n{HEALTH}"
BODY = post("/generate", GENERATE).partition(b"\r\n\r\n")[2].decode()
EXPECTING, _, EXPECTED = post("/generate", GENERATE, headers="Expect: 100-continue\n").partition(b"\r\n\r\n")
TOO_LONG = f"Content-Length: {MAX_BODY_BYTES + 1}"
CONVERSATIONS: dict[str, list[list[Step]]] = {
    "headers that are too large": [
        [head, 431, Then.CLOSED]
        for head in (
            f"GET /health HTTP/1.1\nHost: a\nx: {'y' * MAX_HEADER_BYTES}\n\n",
            f"GET /health HTTP/1.1\nHost: a\nx{'y' * MAX_HEADER_BYTES}: z\n\n",
            "GET /health HTTP/1.1\nHost: a\n" + f"x: {'y' * (MAX_HEADER_BYTES // 50)}\n" * 50,
            f"GET /{'y' * MAX_HEADER_BYTES} HTTP/1.1\nHost: a\n\n",
            f"GET /health HTTP/1.1\nHost: a\n{NAME}",  # which has no end
        )
    ],
    "headers that are too many": [
        [
            Pieces(
                "GET /health HTTP/1.1\nX-Request-Id: mine\nHost: a\n" + "x: y\n" * MAX_HEADERS + end, size
            ),
            431,
            Then.CLOSED,
        ]
        for size, end in itertools.product(PIECES, ("\n", ""))
    ],
    "headers that are just small enough": [
        [
            f"GET /health HTTP/1.1\nHost: a\nx: {'y' * (MAX_HEADER_BYTES - 100)}\n\n",
            200,
            "GET /health HTTP/1.1\nHost: a\n" + "x: y\n" * (MAX_HEADERS - 1) + "\n",
            200,
        ]
        * 2
    ],
    "a body of many tiny chunks": [  # is no header
        [
            f"{CHUNKED}\n",
            Pieces(f"1;{'x' * 1000}\n{{\n" * (2 * MAX_HEADER_BYTES // 1000 + 1), 1003),
            "0\n\n",
            400,
        ]
    ],
    "a long body that is not waited for": [  # no reset takes the place of the answer
        [post("/nowhere", "x" * (2 << 20)) + HEALTH.replace("\n", "\r\n").encode(), 413, 200]
    ],
    "bodies that are too large": [
        # refused before it comes; what comes nevertheless is thrown away
        [f"POST /generate HTTP/1.1\nHost: a\n{TOO_LONG}\n\n", 413, "x" * (MAX_BODY_BYTES + 1), HEALTH, 200],
        [f"{CHUNKED}\n", *[f"3e8\n{'x' * 1000}\n"] * 5, 413],
    ],
    "Expect: 100-continue": [
        [EXPECTING + b"\r\n\r\n", 100, EXPECTED, 200],
        [f"POST /generate HTTP/1.1\nHost: a\n{TOO_LONG}\nExpect: 100-continue\n\n", 413],
    ],
    "hosts": [
        [f"GET {path} HTTP/{version}\n{hosts}\n", status]
        for path, version, hosts, status in (
            ("/health", "1.1", "", 400),
            ("/generate", "1.1", "", 400),
            ("/health", "1.1", "Host: a\nHost: a\n", 400),
            ("/health", "1.0", "Host: a\nHost: b\n", 400),
            ("/health", "1.0", "", 200),
            ("/generate", "1.0", "", 405),
        )
    ],
    "HTTP/1.0": [[post("/generate", body, version="1.0"), 200, Then.CLOSED] for body in (GENERATE, STREAM)],
    "chunked bodies": [
        [Pieces(CHUNKED + "\n" + "".join(f"1\n{char}\n" for char in BODY) + "0\n\n", 6), 200, HEALTH, 200]
    ],
    "an upgrade that is not taken up": [
        [f"GET /health HTTP/1.1\nHost: a\nConnection: Upgrade\nUpgrade: {protocol}\n\n", 200]
        for protocol in ("websocket", "h2c")
    ],
    "an upgrade that cannot be ignored": [
        ["\n\n" + SMUGGLED, 400, Then.CLOSED],
        [f"CONNECT /health HTTP/1.1\n{OFFER}\n\n", 400, Then.CLOSED],
    ],
    "half a request and no more": [
        [said, Then.ENDS, Then.CLOSED]
        for said in (
            "",
            "GET /heal",
            "POST /generate HTTP/1.1\nHost: a\nContent-Length: 9\n\n{",
            CHUNKED + "\n5",
        )
    ],
    "what is not HTTP": [
        [said, 400, Then.CLOSED]
        for said in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            "PRI * HTTP/2.0\n\nSM\n\n",
            "GET /health HTTP/3.0\n\n",
            b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
            "CONNECT a:443 HTTP/1.1\nHost: a\n\n",
            b"GET /health HTTP/1.1\r\nHost: a\r\nx\x00: y\r\n\r\n",
            "GET /health HTTP/1.1\nno colon\n\n",
            "POST /generate HTTP/1.1\nHost: a\nContent-Length: -1\n\n",
            "POST /generate HTTP/1.1\nHost: a\nContent-Length: 1\nContent-Length: 2\n\n{}",
            "POST /generate HTTP/1.1\nHost: a\nContent-Length: 99999999999999999999\n\n{}",
            "POST /generate HTTP/1.1\nHost: a\nContent-Length: 2\nTransfer-Encoding: chunked\n\n{}",
            f"{CHUNKED}\nzz\n{{}}\n0\n\n",
        )
    ],
}


@pytest.mark.parametrize("what", CONVERSATIONS)
async def test_a_conversation(model_folder: Path, what: str) -> None:
    async with playing(model_folder) as (port, _):
        for steps in CONVERSATIONS[what]:
            await converse(port, *steps)


# --------------------------------------------------------------------------------------------- trailers
async def test_trailers_that_are_too_much(model_folder: Path) -> None:
    too_many = "a: b\n" * (MAX_HEADERS + 1)
    too_much = (
        too_many,
        f"a: {'b' * (MAX_HEADER_BYTES // 40)}\n" * 45,
        f"a: {'b' * 6 * MAX_HEADER_BYTES}",  # a value without an end
        f"a{'b' * 6 * MAX_HEADER_BYTES}",  # a name without one
    )
    async with playing(model_folder) as (port, decode):
        for trailers, piece in itertools.product(too_much, PIECES):
            async with raw_client(port) as client:
                client.send(f"{CHUNKED}X-Request-Id: mine\n\n2\n{{}}\n0\n")
                await client.send_in_pieces(trailers, piece)
                if trailers is too_many and piece > len(trailers):  # else a reset may overtake the answer
                    answer = await client.answer()
                    assert (answer.status, answer.headers["x-request-id"]) == (431, "mine")
                await client.closed()
            async with raw_client(port) as client:  # after an answer that did not wait for them
                client.send("GET /health HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n\n0\n")
                assert (await client.answer()).status == 200
                await client.send_in_pieces(trailers, piece)
                assert b"HTTP/1.1" not in await client.closed()
        assert decode.all(Decode) == []


async def test_trailers_are_no_headers(model_folder: Path) -> None:
    head = f"{CHUNKED}X-Request-Id: mine\n\n{len(BODY):x}\n{BODY}\n"
    trailers = "0\nHost: b\nX-Request-Id: theirs\nContent-Encoding: gzip\n\n"
    async with playing(model_folder) as (port, _):
        await converse(port, head + trailers, head, trailers, 200, 200)


# ------------------------------------------------------------------------------------- beside the others
async def test_what_is_refused_below_the_app_is_logged(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with playing(model_folder, log_requests=True) as (port, _), raw_client(port) as client:
        client.send(b"no http\r\n\r\n")
        answer = await client.answer()

        def logged() -> list[str]:
            return [r.getMessage() for r in caplog.records if "status=400" in r.getMessage()]

        told = await eventually(logged)
        assert len(told) == 1 and told[0].startswith("request ")
        assert f"request_id={answer.headers['x-request-id']}" in told[0]


async def test_timers_leave_those_alone_whom_the_router_makes_wait(model_folder: Path) -> None:
    """Its own slowness is no reason to hang up: a request may be queued far longer than a client may be slow."""

    async def late(node: FakeNode, work: Any) -> None:
        for position in range(4):
            await asyncio.sleep(0.5)
            finish = Finish("length") if position == 3 else None
            node.tokens(work.key, position, [node.story[position]], finish)

    hasty = replace(PATIENT, header_timeout_s=1.5, body_timeout_s=1.5, write_timeout_s=1.5)
    async with playing(model_folder, hasty, decode=late) as (port, _), raw_client(port) as client:
        client.send(post("/generate", GENERATE))
        assert (await client.answer()).status == 200
        client.send(post("/generate", STREAM))
        assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")


async def test_too_many_connections(model_folder: Path) -> None:
    async with (
        playing(model_folder, replace(PATIENT, max_connections=2), decode=one_then_nothing) as (port, decode),
        streaming(port),
        streaming(port) as second,
    ):
        async with raw_client(port) as third:
            third.send(HEALTH)
            assert (await third.answer()).status == 200
            third.send("GET /metrics?x=1 HTTP/1.1\nHost: a\n\n")
            assert b"sglang:num_requests_total" in (await third.answer()).body
            third.send(post("/generate", GENERATE, headers="X-Request-Id: mine\n"))
            answer = await third.answer()
            assert answer.headers["x-request-id"] == "mine"
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert await third.closed() == b""
        async with contextlib.AsyncExitStack() as spares:
            for _ in range(NUM_SPARE_CONNECTIONS):
                spare = await spares.enter_async_context(raw_client(port))
                spare.send(HEALTH)
                assert (await spare.answer()).status == 200
            await converse(port, Then.CLOSED)
        for work in decode.all(Decode):
            decode.tokens(work.key, 1, decode.story[1:4], Finish("length"))
        assert (await second.read_until(b"data: [DONE]\n\n")).count(b"data: ") == 2
        await converse(port, HEALTH, 200)  # the second's connection is over or idle, the first one's too


@pytest.mark.parametrize(
    "more", [HEALTH * (MAX_PIPELINED + 1), "\x00garbage\n\n"], ids=["requests", "garbage"]
)
async def test_what_may_not_come_behind_a_stream_never_gets_into_it(model_folder: Path, more: str) -> None:
    async with playing(model_folder, decode=one_then_nothing) as (port, decode), streaming(port) as client:
        client.send(more)
        assert b"HTTP/1.1" not in await client.closed()
        await decode.wait_for(Cancel)


async def test_pipelined_requests_are_answered_in_order(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _), raw_client(port) as client:
        client.send(post("/generate", STREAM))
        client.send(post("/generate", GENERATE))
        streamed, whole = [await client.answer() for _ in range(2)]
        assert (streamed.status, whole.status) == (200, 200)
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert b'"output_ids"' in whole.body


async def test_a_request_that_offers_an_upgrade_keeps_its_body(model_folder: Path) -> None:
    """Java's HttpClient offers HTTP/2 with the first request of a connection."""
    async with playing(model_folder) as (port, _):
        for name, size in itertools.product(("Upgrade", "upgrade"), (1 << 20, 1, 7)):
            body = json.dumps(GENERATE) + f"\n{name}: in the body is JSON's white space and no JSON"
            offer = f"Connection: Upgrade, HTTP2-Settings\n{name}: h2c\nHTTP2-Settings: AAEA"

            def head(content: str, offer: str = offer) -> str:
                length = len(content.replace("\n", "\r\n"))
                return f"POST /generate HTTP/1.1\nHost: a\n{offer}\nContent-Length: {length}\n\n"

            right = Pieces(head(BODY) + BODY, size)
            in_two_segments: list[Step] = [head(body), Then.WAITS, body, HEALTH, 400, 200]
            await converse(port, right, 200, Pieces(head(body) + body, size), 400, *in_two_segments)
