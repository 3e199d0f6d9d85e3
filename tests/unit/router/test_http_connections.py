"""Connections of slow, odd and hostile clients: each gets the right status or is closed, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.http.config import ConnectionOptions, HttpLimits, HttpOptions
from router.http.connection import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    NUM_SPARE_CONNECTIONS,
)
from shared.protocol.messages import Cancel, Decode, Finish
from tests.patience import eventually
from tests.unit.router.fakes import FakeNode, joined_router, one_then_nothing, pair
from tests.unit.router.raw_client import RawClient, post, raw_client

PATIENT = ConnectionOptions(
    header_timeout_s=600, body_timeout_s=600, write_timeout_s=600, keep_alive_timeout_s=600
)
HEALTH = "GET /health HTTP/1.1\nHost: a\n\n"
GENERATE: dict[str, Any] = {"text": "a fox", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
MAX_BODY_BYTES = 4000
PIECES = (1 << 20, 700)
"""All at once, and in pieces of so many bytes."""
TOO_MANY = f"the request has more than {MAX_HEADERS} headers and trailers"
TOO_LARGE = f"the headers and trailers are larger than {MAX_HEADER_BYTES} bytes"

pytestmark = [pytest.mark.uvloop, pytest.mark.usefixtures("quiet")]


@contextlib.asynccontextmanager
async def playing(
    model_folder: Path, options: ConnectionOptions = PATIENT, *, log_requests: bool = False, **scripts: object
) -> AsyncIterator[tuple[int, FakeNode]]:
    """A router's port and its decode node. No sequence, task or open file may be left in the router afterwards."""
    limits = HttpLimits(max_body_bytes=MAX_BODY_BYTES)
    http = HttpOptions(port=0, served_model_name="tiny", limits=limits, log_requests=log_requests)
    async with (
        pair(**scripts) as (prefill, decode),
        joined_router(model_folder, [prefill, decode], http=http, connections=options) as (router, client),
    ):
        await client.aclose()
        await asyncio.sleep(0.05)
        before = held()
        yield router.http_port, decode
        await eventually(lambda: not any(now > then for now, then in zip(held(), before, strict=True)))
        assert router._dispatcher.num_running == 0


def held() -> tuple[int, int]:
    """Open files, and tasks."""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


@contextlib.asynccontextmanager
async def streaming(port: int, **fields: object) -> AsyncIterator[RawClient]:
    """A client that has had the first event of a stream."""
    async with raw_client(port) as client:
        client.send(post("/generate", {**GENERATE, "stream": True, **fields}))
        assert b" 200 " in await client.read_until(b"\n")
        await client.read_until(b"data: ")
        yield client


# ---------------------------------------------------------------------------------------------- too slow
async def test_who_sends_nothing_is_closed(model_folder: Path) -> None:
    async with (
        playing(model_folder, replace(PATIENT, header_timeout_s=0.2)) as (port, _),
        raw_client(port) as client,
    ):
        assert await client.closed() == b""


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


async def test_headers_that_come_too_slowly(model_folder: Path) -> None:
    async with (
        playing(model_folder, replace(PATIENT, header_timeout_s=2)) as (port, _),
        raw_client(port) as first,
        raw_client(port) as later,
    ):
        later.send(HEALTH)
        assert (await later.answer()).status == 200
        for client in (first, later):
            client.send("GET /health HTTP/1.1\n")
        for _ in range(4):  # a trickle is no excuse
            await asyncio.sleep(0.05)
            first.send("a: b\n")
        for client in (first, later):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (408, "close")
            assert len(answer.headers["x-request-id"]) == 32
            assert answer.error["message"] == "the headers did not arrive within 2 s"
            assert await client.closed() == b""


async def test_a_body_that_comes_too_slowly(model_folder: Path) -> None:
    async with playing(model_folder, replace(PATIENT, body_timeout_s=0.2)) as (port, _):
        for path in ("/generate", "/v1/chat/completions", "/tokenize"):
            async with raw_client(port) as client:
                headers = "Host: a\nX-Request-Id: mine\nContent-Length: 100"
                client.send(f'POST {path} HTTP/1.1\n{headers}\n\n{{"text"')
                answer = await client.answer()
                assert answer.headers["x-request-id"] == "mine"
                assert (answer.status, answer.error["type"]) == (408, "timeout_error")
                assert answer.error["message"] == "the body did not arrive within 0.2 s"
                assert await client.closed() == b""


async def test_a_body_after_its_answer_cannot_hold_the_connection(model_folder: Path) -> None:
    async with (
        playing(model_folder, replace(PATIENT, body_timeout_s=0.2)) as (port, _),
        raw_client(port) as client,
    ):
        client.send(f"POST /generate HTTP/1.1\nHost: a\nContent-Length: {MAX_BODY_BYTES + 1}\n\n")
        assert (await client.answer()).status == 413
        client.send("x")
        assert await client.closed() == b""


async def test_an_idle_connection_is_closed(model_folder: Path) -> None:
    async with (
        playing(model_folder, replace(PATIENT, keep_alive_timeout_s=1)) as (port, _),
        raw_client(port) as client,
    ):
        client.send(HEALTH)
        assert (await client.answer()).status == 200
        assert await client.closed() == b""


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
        client.send(post("/generate", {**GENERATE, "stream": True}))
        assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")


# ------------------------------------------------------------------------------------------------ too much
async def test_headers_that_are_too_large(model_folder: Path) -> None:
    name = "x" * 5 * MAX_HEADER_BYTES
    async with playing(model_folder) as (port, _):
        for head in (
            f"GET /health HTTP/1.1\nHost: a\nx: {'y' * MAX_HEADER_BYTES}\n\n",
            f"GET /health HTTP/1.1\nHost: a\nx{'y' * MAX_HEADER_BYTES}: z\n\n",
            "GET /health HTTP/1.1\nHost: a\n" + f"x: {'y' * (MAX_HEADER_BYTES // 50)}\n" * 50,
            f"GET /{name} HTTP/1.1\nHost: a\n\n",
            f"GET /health HTTP/1.1\nHost: a\n{name}",  # which has no end
        ):
            async with raw_client(port) as client:
                client.send(head)
                answer = await client.answer()
                assert answer.status == 431 and len(answer.headers["x-request-id"]) == 32
                assert answer.error["message"] == TOO_LARGE
                assert await client.closed() == b""


async def test_headers_that_are_too_many(model_folder: Path) -> None:
    headers = "X-Request-Id: mine\nHost: a\n" + "x: y\n" * MAX_HEADERS
    async with playing(model_folder) as (port, _):
        for piece, end in itertools.product(PIECES, ("\n", "")):
            async with raw_client(port) as client:
                await client.send_in_pieces(f"GET /health HTTP/1.1\n{headers}{end}", piece)
                answer = await client.answer()
                assert (answer.status, answer.headers["x-request-id"]) == (431, "mine")
                assert answer.error["message"] == TOO_MANY
                assert await client.closed() == b""


async def test_headers_that_are_just_small_enough(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _), raw_client(port) as client:
        for _ in range(2):
            client.send(f"GET /health HTTP/1.1\nHost: a\nx: {'y' * (MAX_HEADER_BYTES - 100)}\n\n")
            assert (await client.answer()).status == 200
            client.send("GET /health HTTP/1.1\nHost: a\n" + "x: y\n" * (MAX_HEADERS - 1) + "\n")
            assert (await client.answer()).status == 200


CHUNKED = "POST /generate HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n"


async def test_trailers_that_are_too_much(model_folder: Path) -> None:
    too_much = {
        "a: b\n" * (MAX_HEADERS + 1): TOO_MANY,
        f"a: {'b' * (MAX_HEADER_BYTES // 40)}\n" * 45: TOO_LARGE,
        f"a: {'b' * 6 * MAX_HEADER_BYTES}": TOO_LARGE,  # a value without an end
        f"a{'b' * 6 * MAX_HEADER_BYTES}": TOO_LARGE,  # a name without one
    }
    async with playing(model_folder) as (port, decode):
        for (trailers, message), piece in itertools.product(too_much.items(), PIECES):
            async with raw_client(port) as client:
                client.send(f"{CHUNKED}X-Request-Id: mine\n\n2\n{{}}\n0\n")
                await client.send_in_pieces(trailers, piece)
                if message != TOO_LARGE and piece > len(trailers):  # else a reset may overtake the answer
                    answer = await client.answer()
                    assert (answer.status, answer.headers["x-request-id"]) == (431, "mine")
                    assert answer.error["message"] == message
                await client.closed()
            async with raw_client(port) as client:  # after an answer that did not wait for them
                client.send("GET /health HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n\n0\n")
                assert (await client.answer()).status == 200
                await client.send_in_pieces(trailers, piece)
                assert b"HTTP/1.1" not in await client.closed()
        assert decode.all(Decode) == []


async def test_trailers_are_no_headers(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        body = post("/generate", GENERATE).partition(b"\r\n\r\n")[2]
        chunk = b"%x\r\n%s\r\n" % (len(body), body)
        head = f"{CHUNKED}X-Request-Id: mine\n\n".replace("\n", "\r\n").encode()
        trailers = b"0\r\nHost: b\r\nX-Request-Id: theirs\r\nContent-Encoding: gzip\r\n\r\n"
        async with raw_client(port) as client:
            client.send(head + chunk + trailers)
            client.send(head + chunk)
            client.send(trailers)
            for _ in range(2):
                answer = await client.answer()
                assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")


async def test_a_body_of_many_tiny_chunks_is_no_header(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _), raw_client(port) as client:
        client.send(f"{CHUNKED}\n")
        for _ in range(2 * MAX_HEADER_BYTES // 1000 + 1):
            client.send("1;" + "x" * 1000)
            client.send("\n{\n")
            await asyncio.sleep(0)
        client.send("0\n\n")
        assert (await client.answer()).status == 400


async def test_an_answer_that_does_not_wait_for_a_long_body_arrives(model_folder: Path) -> None:
    """As for a long prompt with a wrong key: no reset takes the place of the answer."""
    async with playing(model_folder) as (port, _):
        for _ in range(2):
            async with raw_client(port) as client:
                client.send(post("/nowhere", "x" * (2 << 20)) + HEALTH.replace("\n", "\r\n").encode())
                assert [(await client.answer()).status for _ in range(2)] == [413, 200]


async def test_bodies_that_are_too_large(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        async with raw_client(
            port
        ) as client:  # refused before it comes; what comes nevertheless is thrown away
            client.send(f"POST /generate HTTP/1.1\nHost: a\nContent-Length: {MAX_BODY_BYTES + 1}\n\n")
            assert (await client.answer()).status == 413
            client.send("x" * (MAX_BODY_BYTES + 1))
            client.send(HEALTH)
            assert (await client.answer()).status == 200
        async with raw_client(port) as client:
            client.send("POST /generate HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n\n")
            for _ in range(5):
                client.send("3e8\n" + "x" * 1000 + "\n")
            assert (await client.answer()).status == 413


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
            assert answer.error["message"] == "there are already 2 connections, as many as may be"
            assert await third.closed() == b""
        async with contextlib.AsyncExitStack() as spares:
            for _ in range(NUM_SPARE_CONNECTIONS):
                spare = await spares.enter_async_context(raw_client(port))
                spare.send(HEALTH)
                assert (await spare.answer()).status == 200
            async with raw_client(port) as refused:
                assert await refused.closed() == b""
        for work in decode.all(Decode):
            decode.tokens(work.key, 1, decode.story[1:4], Finish("length"))
        assert (await second.read_until(b"data: [DONE]\n\n")).count(b"data: ") == 2
        async with raw_client(port) as again:  # the second's connection is over or idle, the first one's too
            again.send(HEALTH)
            assert (await again.answer()).status == 200


async def test_too_many_requests_at_once_on_one_connection(model_folder: Path) -> None:
    async with playing(model_folder, decode=one_then_nothing) as (port, decode), streaming(port) as client:
        client.send(HEALTH * (MAX_PIPELINED + 1))
        assert b"HTTP/1.1" not in await client.closed()  # not in the middle of the stream
        await decode.wait_for(Cancel)


# --------------------------------------------------------------------------------------------- odd, but right
async def test_pipelined_requests_are_answered_in_order(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _), raw_client(port) as client:
        client.send(post("/generate", {**GENERATE, "stream": True}))
        client.send(post("/generate", GENERATE))
        streamed, whole = [await client.answer() for _ in range(2)]
        assert (streamed.status, whole.status) == (200, 200)
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert b'"output_ids"' in whole.body


async def test_a_request_names_one_host(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        for path, version, hosts, status in (
            ("/health", "1.1", "", 400),
            ("/generate", "1.1", "", 400),
            ("/health", "1.1", "Host: a\nHost: a\n", 400),
            ("/health", "1.0", "Host: a\nHost: b\n", 400),
            ("/health", "1.0", "", 200),
            ("/generate", "1.0", "", 405),
        ):
            async with raw_client(port) as client:
                client.send(f"GET {path} HTTP/{version}\n{hosts}\n")
                answer = await client.answer()
                assert answer.status == status
                assert status != 400 or "Host" in answer.error["message"]


async def test_http_1_0(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        async with raw_client(port) as client:
            client.send(post("/generate", GENERATE, version="1.0"))
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.closed() == b""
        async with raw_client(port) as client:
            client.send(post("/generate", {**GENERATE, "stream": True}, version="1.0"))
            assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")
            assert await client.closed() == b""


async def test_expect_100_continue(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        request = post("/generate", GENERATE, headers="Expect: 100-continue\n")
        head, _, body = request.partition(b"\r\n\r\n")
        async with raw_client(port) as client:
            client.send(head + b"\r\n\r\n")
            assert (await client.answer()).status == 100
            client.send(body)
            assert (await client.answer()).status == 200
        async with raw_client(port) as client:  # not invited to send what is too large
            length = f"Content-Length: {MAX_BODY_BYTES + 1}"
            client.send(f"POST /generate HTTP/1.1\nHost: a\n{length}\nExpect: 100-continue\n\n")
            assert (await client.answer()).status == 413


async def test_chunked_bodies(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        body = post("/generate", GENERATE).partition(b"\r\n\r\n")[2]
        async with raw_client(port) as client:
            client.send("POST /generate HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n\n")
            for byte in body:
                client.send(b"1\r\n" + bytes([byte]) + b"\r\n")
                await asyncio.sleep(0)
            client.send("0\n\n")
            assert (await client.answer()).status == 200
            client.send(HEALTH)
            assert (await client.answer()).status == 200


async def test_an_upgrade_is_not_taken_up(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        for protocol in ("websocket", "h2c"):
            async with raw_client(port) as client:
                client.send(f"GET /health HTTP/1.1\nHost: a\nConnection: Upgrade\nUpgrade: {protocol}\n\n")
                assert (await client.answer()).status == 200


async def test_a_request_that_offers_an_upgrade_keeps_its_body(model_folder: Path) -> None:
    """Java's HttpClient offers HTTP/2 with the first request of a connection."""
    async with playing(model_folder) as (port, _):
        for name, piece in itertools.product(("Upgrade", "upgrade"), (1 << 20, 1, 7)):
            body = json.dumps(GENERATE) + f"\n{name}: in the body is JSON's white space and no JSON"
            offer = f"Connection: Upgrade, HTTP2-Settings\n{name}: h2c\nHTTP2-Settings: AAEA"
            async with raw_client(port) as client:
                for content, status in ((json.dumps(GENERATE), 200), (body, 400)):
                    length = len(content.replace("\n", "\r\n"))
                    head = f"POST /generate HTTP/1.1\nHost: a\n{offer}\nContent-Length: {length}\n\n"
                    await client.send_in_pieces(head + content, piece)
                    assert (await client.answer()).status == status
                await client.send_in_pieces(head, 1 << 20)  # the head and the body in two segments
                await asyncio.sleep(0.05)
                client.send(content)
                client.send(HEALTH)
                assert [(await client.answer()).status for _ in range(2)] == [400, 200]


async def test_an_upgrade_that_cannot_be_ignored_is_refused(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        offer = "Host: a\nConnection: Upgrade\nUpgrade: h2c"
        smuggled = f"GET /health HTTP/1.1\n{offer}\nContent-Length: {len(HEALTH) + 3}\n\n{HEALTH}"
        for sent in ("\n\n" + smuggled, f"CONNECT /health HTTP/1.1\n{offer}\n\n"):
            async with raw_client(port) as client:
                client.send(sent)
                answer = await client.answer()
                assert answer.status == 400 and "Upgrade" in answer.error["message"]
                assert await client.closed() == b""


# ------------------------------------------------------------------------------------------------- gone
async def test_half_a_request_and_no_more(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        for said in (
            "",
            "GET /heal",
            "POST /generate HTTP/1.1\nHost: a\nContent-Length: 9\n\n{",
            CHUNKED + "\n5",
        ):
            async with raw_client(port) as client:
                client.send(said)
                client.writer.write_eof()
                assert await client.closed() == b""


# ------------------------------------------------------------------------------------------------- wrong
NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/3.0\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nx\x00: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
)


async def test_what_is_not_http(model_folder: Path) -> None:
    async with playing(model_folder) as (port, _):
        for sent in NO_HTTP:
            async with raw_client(port) as client:
                client.send(sent)
                answer = await client.answer()
                assert (answer.status, answer.headers["connection"]) == (400, "close")
                assert answer.error["type"] == "invalid_request_error"
                assert await client.closed() == b""


async def test_garbage_behind_a_request_never_gets_into_its_answer(model_folder: Path) -> None:
    async with playing(model_folder, decode=one_then_nothing) as (port, decode), streaming(port) as client:
        client.send(b"\x00garbage\r\n\r\n")
        assert b"HTTP/1.1" not in await client.closed()
        await decode.wait_for(Cancel)


async def test_gone_with_a_request_still_waiting_behind_a_stream(model_folder: Path) -> None:
    async with playing(model_folder, decode=one_then_nothing) as (port, decode):
        async with streaming(port) as client:
            client.send(HEALTH)
            await asyncio.sleep(0.05)
        for work in decode.all(Decode):
            decode.tokens(work.key, 1, decode.story[1:4], Finish("length"))
