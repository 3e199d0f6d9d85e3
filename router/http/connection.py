"""One HTTP connection: uvicorn's, with the timers and bounds against slow and hostile clients that uvicorn lacks.

    connected ──headers──▶ request ──body──▶ response ──▶ idle ──▶ the next headers
                 │                  │            │          │
        header_timeout_s   body_timeout_s        │    keep_alive_timeout_s (uvicorn's own)
                               write_timeout_s, if the client takes none of the waiting bytes

A call of the parser that refuses raises, which ends the parsing. ADR 19 lists what is used of uvicorn.
Written bytes that the client has not taken are bounded too: beyond uvloop's high-water mark (64 KiB) `send` waits, so
at most that and one event are buffered here, beside the socket's own buffer (net.ipv4.tcp_wmem).
"""

from __future__ import annotations

import asyncio
import http
import re
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.config import ConnectionOptions
from router.http.responses import HEADER, error_body, request_id_of
from shared.errors import RequestError
from shared.log import event

MAX_HEADER_BYTES = 64 << 10
"""The most bytes of the request line, all headers and all trailers of one request."""
MAX_HEADERS = 100
"""The most headers and trailers of one request: each costs some 200 bytes besides its own."""
MAX_PIPELINED = 1
"""The most requests that wait behind the one that is being answered: their headers are kept."""
NUM_SPARE_CONNECTIONS = 64
"""Connections that are accepted beyond --max-connections, for probes; other requests on them get a 503."""
PROBES = (b"/health", b"/metrics")
"""Paths that are answered on a spare connection."""

_UPGRADE = re.compile(rb"(?<=\nupgrade):", re.IGNORECASE)
_TAIL_BYTES = len(b"\nupgrade")


class Connections:
    """The open connections, and their options."""

    def __init__(self, options: ConnectionOptions, *, log_requests: bool) -> None:
        self.options = options
        self.log_requests = log_requests
        self.open: set[Connection] = set()

    def __len__(self) -> int:
        """The number of clients that are connected, busy or not."""
        return len(self.open)

    @property
    def num_unsent_bytes(self) -> int:
        """Written bytes that clients have not taken, without the kernel's buffers."""
        return sum(connection.transport.get_write_buffer_size() for connection in self.open)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, as `HttpServer` makes it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = connections
        self._options = connections.options
        self._is_spare = False
        self._running: RequestResponseCycle | None = None
        """The request that the app has."""
        self._refusal: RequestError | None = None
        self._in_headers = self._in_body = False
        self._tail = b""
        """The last bytes of headers whose end has not come."""
        self._num_headers = self._header_bytes = 0
        """All of the request that is being parsed, trailers included."""
        self._unparsed_bytes = 0
        """Bytes since the last end of headers, or of a body or a part of it."""
        self._passed_a_boundary = False
        """True if the last data had such an end."""
        self._client_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------- the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection, or drop it if there are too many even with spare ones."""
        self._all.open.add(self)
        super().connection_made(transport)
        num_beyond = len(self._all) - self._options.max_connections
        self._is_spare = num_beyond > 0
        if num_beyond > NUM_SPARE_CONNECTIONS:
            transport.abort()
        else:
            self._time_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after a client that is gone or was dropped, and let go of all that refers to this connection.

        The cycle collector runs too rarely to do that (`router_process.collect_rarely`).
        """
        self._all.open.discard(self)
        self._disconnect()
        super().connection_lost(None)  # with an error, it would keep the timer of an idle connection
        self._cancel_client_timer()
        self._cancel_write_timer()
        self.pipeline.clear()
        del self.cycle, self.scope, self._running

    def data_received(self, data: bytes) -> None:
        """Parse data, which calls the methods below."""
        self._passed_a_boundary = False
        tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        super().data_received(data if self._in_body else self._hide_upgrade(data))
        self._tail = tail if self._in_headers else b""
        if not self._passed_a_boundary:
            self._unparsed_bytes += len(data)
        if not self.transport.is_closing():
            if self._unparsed_bytes > MAX_HEADER_BYTES:
                self._refuse(_headers_too_large())
            else:
                self._time_client()

    def _hide_upgrade(self, data: bytes) -> bytes:
        """Data of headers in which no `Upgrade` is offered: httptools would take the body for the next request.

        The data is changed up to the first blank line alone, so that it is no body's.
        """
        seen, num_old = self._tail + data, len(self._tail)
        end = seen.find(b"\r\n\r\n")
        end = len(seen) if end < 0 else max(end, num_old)
        return _UPGRADE.sub(b"-ignored:", seen[:end])[num_old:] + seen[end:]

    # ---------------------------------------------------------------------------------- the parser's calls
    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_headers = True
        self._num_headers = self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header, or a trailer, which is left out."""
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS:
            self._stop(
                RequestError(f"the request has more than {MAX_HEADERS} headers and trailers", status=431)
            )
        if self._header_bytes > MAX_HEADER_BYTES:
            self._stop(_headers_too_large())
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are complete: uvicorn gives the request to the app, or has it wait."""
        if self._header_bytes > MAX_HEADER_BYTES:
            self._stop(_headers_too_large())
        if self.parser.should_upgrade():
            self._stop(RequestError("there is no CONNECT, and no Upgrade behind other data of its segment"))
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            # RFC 9112, 3.2: a proxy and this server could read it differently
            self._stop(RequestError(f"the request has {num_hosts} Host headers; one is needed"))
        most = self._options.max_connections
        if self._is_spare and len(self._all) > most and self.url.partition(b"?")[0] not in PROBES:
            self._stop(RequestError(f"there are already {most} connections, as many as may be", status=503))
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._stop(RequestError("too many requests wait for their answers on this connection"))
        self._in_headers, self._in_body = False, True
        self._pass_a_boundary()
        self._cancel_client_timer()

    def on_body(self, body: bytes) -> None:
        """A part of a body, whose size `JsonBodies` bounds."""
        super().on_body(body)
        self._pass_a_boundary()

    def on_message_complete(self) -> None:
        """The body and its trailers are complete."""
        super().on_message_complete()
        self._in_body = False
        self._pass_a_boundary()
        self._cancel_client_timer()

    def _pass_a_boundary(self) -> None:
        self._passed_a_boundary, self._unparsed_bytes = True, 0

    # ------------------------------------------------------------------------------------------- refusals
    def _stop(self, refusal: RequestError) -> None:
        """End the parsing, after which uvicorn calls `send_400_response`."""
        self._refusal = refusal
        raise ValueError

    def send_400_response(self, msg: str) -> None:
        """Refuse what was parsed. uvicorn calls this for what is no HTTP."""
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or RequestError("this is not a valid HTTP request"))

    def _refuse(self, error: RequestError) -> None:
        """Answer an incomplete request and close the connection. Within another answer it is only closed."""
        is_first = self._num_unanswered == self._in_body
        running = self._running
        if is_first and (running is None or not self._in_body or not running.response_started):
            request_id = request_id_of(self.headers or ())
            if self._all.log_requests:
                event("request", request_id=request_id.decode(), client=self.client, status=error.status)
            body = msgspec.json.encode(error_body(error))
            retry = "retry-after: 1\r\n" if error.status == 503 else ""
            head = (
                f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"{HEADER}: {request_id.decode()}\r\n{retry}connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self._time_writing()
        elif self._num_unanswered:
            self.transport.abort()
        self._disconnect()
        self.transport.close()

    # ------------------------------------------------------------------------------------------- requests
    @property
    def _num_unanswered(self) -> int:
        """Requests whose headers are complete, and whose answers are not."""
        return 1 + len(self.pipeline) if self._is_running else 0

    @property
    def _is_running(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _disconnect(self) -> None:
        """Tell the app that the client is gone. uvicorn tells the last request alone, which may wait behind it."""
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def on_response_complete(self) -> None:
        """Note that the app has written an answer, of which the client may not have taken all."""
        super().on_response_complete()
        self._time_writing()

    # --------------------------------------------------------------------------------------------- timers
    def _time_client(self) -> None:
        """Start the timer of the headers or of the body if the client is to send them."""
        if self._client_timer is not None:
            return
        if self._in_body or not self._num_unanswered:
            timeout_s = self._options.body_timeout_s if self._in_body else self._options.header_timeout_s
            self._client_timer = self.loop.call_later(timeout_s, self._client_is_late, timeout_s)

    def _cancel_client_timer(self) -> None:
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None

    def _client_is_late(self, timeout_s: float) -> None:
        self._client_timer = None
        if self._in_body and self._num_unanswered > 1:
            self._time_client()  # the body is not read before the requests ahead of it are answered
        elif self._in_body or self._unparsed_bytes:
            what = "body" if self._in_body else "headers"
            self._refuse(RequestError(f"the {what} did not arrive within {timeout_s:g} s", status=408))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """Let the app wait in `send`, since the client is slower than its response."""
        super().pause_writing()
        self._time_writing()

    def resume_writing(self) -> None:
        """Let the app write again, since the client has taken most of the waiting bytes."""
        super().resume_writing()
        self._cancel_write_timer()
        if not self._is_added_to:
            self._time_writing()  # for the rest of an answer

    @property
    def _is_added_to(self) -> bool:
        """True while the app may write, and the number of waiting bytes says nothing of the client."""
        return self._is_running and not self.flow.write_paused and not self.transport.is_closing()

    def _time_writing(self) -> None:
        """From now on the client must take some bytes within `write_timeout_s`."""
        self._cancel_write_timer()
        num_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._options.write_timeout_s, self._look, num_bytes)

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _look(self, num_before: int) -> None:
        """Drop a client that has taken none of the waiting bytes since the timer was started."""
        self._write_timer = None
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and not self._is_added_to:
            if num_bytes == num_before:
                event("client_takes_nothing", client=self.client, num_bytes=num_bytes)
                self.transport.abort()
            else:
                self._time_writing()


def _headers_too_large() -> RequestError:
    return RequestError(f"the headers and trailers are larger than {MAX_HEADER_BYTES} bytes", status=431)
