"""One HTTP connection, with the timers and bounds against slow and hostile clients that uvicorn lacks.

    connected ──headers──▶ request ──body──▶ response ──▶ idle ──▶ the next headers
                 │                  │            │          │
        header_timeout_s   body_timeout_s        │    keep_alive_timeout_s (uvicorn's own)
                               write_timeout_s, if the client takes none of the waiting bytes

A `Connection` is between the transport and uvicorn's protocol. It parses the client's data with a parser of its own,
and sees responses on the ASGI side, where it is `scope["state"]["connection"]`; ADR 19 lists what it uses of uvicorn.
Written bytes that the client has not taken are bounded too: beyond uvloop's high-water mark (64 KiB) `send` waits, so
at most that and one event are buffered here, beside the socket's own buffer (net.ipv4.tcp_wmem).
"""

from __future__ import annotations

import asyncio
import http
import re
from collections import deque
from collections.abc import Awaitable
from functools import partial
from types import MethodType
from typing import Any, cast

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.config import ConnectionOptions
from router.http.request_ids import HEADER, request_id_of
from router.http.responses import error_body
from router.http.write_timer import WriteTimer
from shared.errors import RequestError
from shared.log import event

MAX_HEADER_BYTES = 64 << 10
"""The most bytes of the request line, all headers and all trailers of one request."""
MAX_HEADERS = 100
"""The most headers and trailers of one request: each costs some 200 bytes besides its own."""
MAX_PIPELINED = 16
"""The most requests that wait behind the one that is being answered."""
MAX_PIPELINED_HEADERS = 400
"""The most headers of all of these together. Their bytes are at most MAX_HEADER_BYTES."""
MAX_SMALL_CHUNKS = 1024
"""The most chunks of one body, beyond one for each 64 bytes. Each takes as long to parse as some hundred bytes."""
MAX_UNWANTED_BYTES = 32 << 20
"""The most bytes that are read of a body whose request is answered. With a lower bound, a client that sends a long
prompt and a wrong key would get a reset before it has read its 401."""
NUM_SPARE_CONNECTIONS = 64
"""Connections that are accepted beyond --max-connections, for probes; other requests on them get a 503."""

_UPGRADE = re.compile(rb"(?<=\nupgrade):", re.IGNORECASE)
_TAIL_BYTES = len(b"\nupgrade")

_FIRST_PROBE_S = 0.05
_MAX_PROBE_S = 5.0

STATE = "connection"
"""The key of a request's connection in the state of its scope."""


class Connections:
    """The open connections, and their options."""

    def __init__(self, options: ConnectionOptions, *, log_requests: bool) -> None:
        self.options = options
        self.log_requests = log_requests
        self.open: set[Connection] = set()
        self.shaking: set[Connection] = set()
        """Those of HTTPS whose handshake is under way."""

    def __len__(self) -> int:
        """The number of clients that are connected, busy or not."""
        return len(self.open) + len(self.shaking)

    @property
    def num_unsent_bytes(self) -> int:
        """Written bytes that clients have not taken, without the kernel's buffers."""
        return sum(connection.num_unsent_bytes for connection in self.open)


class Connection(asyncio.Protocol):
    """The `http` option of uvicorn. Data that is not refused goes on to uvicorn's own protocol over httptools."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
    ) -> None:
        self._new_inner = partial(HttpToolsProtocol, config, server_state, _loop=_loop)
        self._app_state = app_state
        self._inner: HttpToolsProtocol
        self._parser: httptools.HttpRequestParser
        self._connections = connections
        self.options = connections.options
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._url = b""
        self._request_ids: list[tuple[bytes, bytes]] = []
        """Those of the headers that may be the request's id."""
        self._awaits_headers = True
        self._in_headers = False
        self._tail = b""
        """The last bytes of headers whose end has not come."""
        self._num_headers = 0
        self._header_bytes = 0
        """Both of the request that is being parsed, with its trailers."""
        self._unparsed_bytes = 0
        """Bytes since the last boundary."""
        self._num_chunks = self._body_bytes = self._unwanted_bytes = 0
        """All of the request that is being parsed; unwanted ones come when it is answered."""
        self._headers_of: deque[tuple[int, int, int]] = deque()
        """Of requests that the app does not have yet: the number of headers, it with trailers, and bytes of all."""
        self._num_requests = 0
        """Requests whose headers are complete."""
        self._num_answered = 0
        self._passed_a_boundary = False
        """True if the last data had the end of headers, or of a body or a part of it."""
        self._response_started = self._has_head = False
        """The app has begun an answer; its head is written, for which `send` may wait."""
        self._refusal: RequestError | None = None
        """Why the data that is being parsed is not passed on."""
        self._write_paused = False
        self._lost = self._ended = False
        """The client is gone, or sends no more."""
        self._cycle: RequestResponseCycle | None = None
        """uvicorn's side of the request that the app has."""
        self._client_timer: asyncio.TimerHandle | None = None
        self._write_timer: WriteTimer

    @property
    def num_unsent_bytes(self) -> int:
        """Written bytes that the client has not taken yet."""
        return self._transport.get_write_buffer_size()

    # ------------------------------------------------------------------------------------- the connection
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a new connection, or drop it if there are too many even with spare ones."""
        self._transport = cast("asyncio.Transport", transport)
        self._connections.shaking.discard(self)
        self._connections.open.add(self)
        self._write_timer = WriteTimer(
            self._loop, self._transport, self.options.write_timeout_s, self._is_added_to
        )
        # These refer to the connection, which nothing would free after a handshake that failed.
        self._inner = self._new_inner(app_state={**self._app_state, STATE: self})
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._inner.connection_made(self._transport)
        self._spare = len(self._connections) > self.options.max_connections
        if len(self._connections) > self.options.max_connections + NUM_SPARE_CONNECTIONS:
            self._transport.abort()
        else:
            self._time_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after a client that is gone or was dropped, and let go of all that refers to this connection.

        The cycle collector runs too rarely to do that (`collect_rarely`).
        """
        self._connections.open.discard(self)
        self._lost = True
        if self._cycle is not None:
            _disconnect(self._cycle)
        self._inner.connection_lost(None)  # with an error, it would keep the timer of an idle connection
        vars(self._inner).clear()  # requests that wait refer to it, and it to them
        self._cancel_client_timer()
        self._write_timer.stop()
        del self._inner, self._parser, self._cycle, self._write_timer

    def data_received(self, data: bytes) -> None:
        """Parse data, and pass it on unless it is refused."""
        may_answer, self._passed_a_boundary = self._may_answer, False
        if not (self._awaits_headers or self._answering):
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > MAX_UNWANTED_BYTES:
                self._transport.close()
                return
        tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        if self._awaits_headers:
            data = self._hide_upgrade(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # refused when the headers were complete
        except httptools.HttpParserError:
            self._refusal = _not_http()
        self._tail = tail if self._in_headers else b""
        if not self._passed_a_boundary:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > MAX_HEADER_BYTES:
                self._refusal = _headers_too_large()
        if self._refusal is not None:
            self._refuse(self._refusal, may_answer=may_answer)
        else:
            self._inner.data_received(data)
            self._time_client()

    def _hide_upgrade(self, data: bytes) -> bytes:
        """Data of headers in which no `Upgrade` is offered: httptools would take the body for the next request.

        The data is changed up to the first blank line alone, so that it is no body's.
        """
        seen, num_old = self._tail + data, len(self._tail)
        end = seen.find(b"\r\n\r\n")
        end = len(seen) if end < 0 else max(end, num_old)
        return _UPGRADE.sub(b"-ignored:", seen[:end])[num_old:] + seen[end:]

    def eof_received(self) -> bool:
        """Serve a client that shuts its sending side down to the end. True: the connection stays open.

        A client that has left looks the same until it is written to. HTTP/1.0 has nothing that may be written before
        an answer, and TLS of the event loop closes both sides at once.
        """
        self._ended = (
            self._answering
            and self._awaits_headers
            and self._parser.get_http_version() == "1.1"
            and self._transport.get_extra_info("sslcontext") is None
        )
        if self._ended and self._client_timer is None:
            self._probe(_FIRST_PROBE_S)
        return self._ended

    def _probe(self, then_s: float) -> None:
        """Write what a client ignores. From one that has left comes a reset, which makes a later probe fail."""
        self._client_timer = None
        if self._answering:
            # An answer that began and has not ended is a stream of events, in chunks.
            if not self._write_paused and self._response_started == self._has_head:
                comment, interim = b"3\r\n:\n\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"
                self._transport.write(comment if self._response_started else interim)
            self._client_timer = self._loop.call_later(then_s, self._probe, min(4 * then_s, _MAX_PROBE_S))

    # ---------------------------------------------------------------------------------- the parser's calls
    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._in_headers = True
        self._url, self._request_ids = b"", []
        self._num_headers = self._header_bytes = 0
        self._num_chunks = self._body_bytes = self._unwanted_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        self._url += url
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header or trailer."""
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS:
            self._refusal = RequestError(
                f"the request has more than {MAX_HEADERS} headers and trailers", status=431
            )
        elif self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = _headers_too_large()
        elif self._awaits_headers and (name := name.lower()) == HEADER.encode():
            self._request_ids.append((name, value))

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        self._num_requests += 1
        self._headers_of.append((self._num_headers, self._num_headers, self._header_bytes))
        self._awaits_headers = self._in_headers = False
        self._pass_a_boundary()
        self._cancel_client_timer()
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = _headers_too_large()
        elif not _has_path(self._url):
            self._refusal = _not_http()
        elif self._parser.should_upgrade():
            self._refusal = RequestError(
                "there is no CONNECT, and no Upgrade behind other data of its segment"
            )
        elif self._num_requests - self._num_answered > 1 + MAX_PIPELINED or (
            len(self._headers_of) > 1
            and (
                sum(num for _, num, _ in self._headers_of) > MAX_PIPELINED_HEADERS
                or sum(num_bytes for _, _, num_bytes in self._headers_of) > MAX_HEADER_BYTES
            )
        ):
            self._refusal = RequestError("too many requests wait for their answers on this connection")

    def on_chunk_header(self) -> None:
        """The size of a chunk, whose bytes come next."""
        self._num_chunks += 1
        if self._num_chunks > MAX_SMALL_CHUNKS + self._body_bytes // 64:
            self._refusal = RequestError(
                f"the body has more than {MAX_SMALL_CHUNKS} chunks beyond one for each 64 bytes"
            )

    def on_body(self, body: bytes) -> None:
        """A part of a body, whose size `JsonBodies` bounds."""
        self._body_bytes += len(body)
        self._pass_a_boundary()

    def on_message_complete(self) -> None:
        """The body and its trailers are complete."""
        if self._headers_of:
            num_headers, _, _ = self._headers_of.pop()
            self._headers_of.append((num_headers, self._num_headers, self._header_bytes))
        self._awaits_headers = True
        self._pass_a_boundary()
        self._cancel_client_timer()

    def _pass_a_boundary(self) -> None:
        self._passed_a_boundary, self._unparsed_bytes = True, 0

    # ---------------------------------------------------------------------------------------- the ASGI side
    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run `app` for a request of this connection."""
        answered = False
        cycle = cast("RequestResponseCycle", cast("MethodType", receive).__self__)
        if self._lost:
            _disconnect(cycle)
        else:
            self._cycle = cycle
        # uvicorn adds trailers to the headers, if they come at once
        scope["headers"] = scope["headers"][: self._headers_of.popleft()[0]]

        async def send_last(message: Message) -> None:
            nonlocal answered
            await send(message)
            answered = True
            self._answered()

        async def send_head(message: Message) -> None:
            await send(message)
            self._has_head = True

        def sent(
            message: Message,
        ) -> Awaitable[None]:  # no coroutine of its own: there is one call for each event
            self._response_started = True
            if message["type"] == "http.response.start":
                return send_head(message)
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            return send_last(message) if is_last else send(message)

        try:
            await app(scope, receive, sent)
        finally:
            if not answered:
                self._answered()

    def _answered(self) -> None:
        """Note that the app has written an answer, of which the client may not have taken all."""
        self._num_answered += 1
        self._response_started = self._has_head = False
        if self._lost:
            return
        self._write_timer.start()
        if self._ended and not self._answering:
            self._transport.close()

    @property
    def is_beyond_the_bound(self) -> bool:
        """True for a spare connection, as long as there are too many."""
        return self._spare and len(self._connections) > self.options.max_connections

    # --------------------------------------------------------------------------------------- slow requests
    @property
    def _answering(self) -> bool:
        return self._num_requests > self._num_answered

    @property
    def _may_answer(self) -> bool:
        """True while no byte of an answer was sent, and no other answer must be sent first."""
        if self._awaits_headers:
            return not self._answering
        return self._num_requests - self._num_answered == 1 and not self._response_started

    def _time_client(self) -> None:
        """Start the timer of the headers or of the body if the client is to send them."""
        if self._client_timer is not None or self._transport.is_closing():
            return
        if not self._awaits_headers:
            self._client_timer = self._loop.call_later(self.options.body_timeout_s, self._body_is_late)
        elif not self._answering:
            self._client_timer = self._loop.call_later(self.options.header_timeout_s, self._headers_are_late)

    def _cancel_client_timer(self) -> None:
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None

    def _headers_are_late(self) -> None:
        self._client_timer = None
        if self._unparsed_bytes:
            self._refuse(_late("headers", self.options.header_timeout_s), may_answer=self._may_answer)
        else:
            self._transport.close()

    def _body_is_late(self) -> None:
        self._client_timer = None
        if self._num_requests - self._num_answered > 1:
            self._time_client()  # the body is not read before the requests ahead of it are answered
        else:
            self._refuse(_late("body", self.options.body_timeout_s), may_answer=self._may_answer)

    def _refuse(self, error: RequestError, *, may_answer: bool) -> None:
        """Answer an incomplete request and close the connection. Within another answer it is only closed."""
        if may_answer:
            request_id = request_id_of(self._request_ids)
            if self._connections.log_requests:
                client = self._transport.get_extra_info("peername")
                event("request", request_id=request_id.decode(), client=client, status=error.status)
            body = msgspec.json.encode(error_body(error))
            head = (
                f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"{HEADER}: {request_id.decode()}\r\nconnection: close\r\n\r\n"
            )
            self._transport.write(head.encode() + body)
            self._write_timer.start()
        elif self._answering:
            self._transport.abort()
        self._transport.close()

    # --------------------------------------------------------------------------------------- slow responses
    def pause_writing(self) -> None:
        """Let the app wait in `send`, since the client is slower than its response."""
        self._write_paused = True
        self._inner.pause_writing()
        self._write_timer.start()

    def resume_writing(self) -> None:
        """Let the app write again, since the client has taken most of the waiting bytes."""
        self._write_paused = False
        self._inner.resume_writing()
        if self._is_added_to():
            self._write_timer.stop()
        else:
            self._write_timer.start()  # for the rest of an answer

    def _is_added_to(self) -> bool:
        """True while the app may write."""
        return self._answering and not self._write_paused and not self._transport.is_closing()


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the app that the client is gone. uvicorn tells the last request alone, and others may wait behind one."""
    cycle.disconnected = True
    cycle.message_event.set()


def _has_path(url: bytes) -> bool:
    """True if uvicorn can read the target of a request. It cannot read that of a CONNECT."""
    try:
        path = httptools.parse_url(url).path
    except httptools.HttpParserInvalidURLError:
        return False
    return path is not None and path.isascii()


def _not_http() -> RequestError:
    return RequestError("this is not a valid HTTP request")


def _headers_too_large() -> RequestError:
    return RequestError(f"the headers and trailers are larger than {MAX_HEADER_BYTES} bytes", status=431)


def _late(what: str, timeout_s: float) -> RequestError:
    return RequestError(f"the {what} did not arrive within {timeout_s:g} s", status=408)
