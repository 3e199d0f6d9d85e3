"""One HTTP connection that a slow or hostile client cannot hold for ever: the timers and bounds that uvicorn lacks.

    connected ──headers──▶ request ──body──▶ response ──▶ idle ──▶ the next headers
                 │                  │            │          │
        header_timeout_s   body_timeout_s        │    keep_alive_timeout_s
                               write_timeout_s, if the client takes nothing of what waits

What is written and not yet taken is bounded as well: beyond uvloop's high-water mark (64 KiB) `send` waits, so
at most that and one event are buffered here, beside the socket's own buffer (net.ipv4.tcp_wmem).
"""

from __future__ import annotations

import asyncio
import http
from typing import Any

import msgspec
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.config import ConnectionOptions
from router.http.request_ids import HEADER, request_id_of
from router.http.responses import error_body, error_response
from shared.errors import RequestError
from shared.log import event

MAX_HEADER_BYTES = 64 << 10
"""Of the request line and all headers of one request."""
MAX_PIPELINED = 16
"""Requests that wait behind the one that is being answered."""
NUM_SPARE_CONNECTIONS = 64
"""Accepted beyond --max-connections, so that probes are answered and others are told 503."""
PROBES = (b"/health", b"/metrics")
"""Answered on a spare connection."""


class TooManyPipelined(Exception):
    """Raised through the parser, which then gives the connection up."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, with `options` for time and number."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        options: ConnectionOptions,
        log_requests: bool = False,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._options = options
        self._log_requests = log_requests
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last; `cycle` is the one that came last."""
        self._spare = False
        self._awaits_headers = True
        self._header_bytes = 0
        """Of headers that are not complete yet."""
        self._num_boundaries = 0
        """Ends of headers and of bodies that the parser has seen."""
        self._client_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------- the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        num_beyond = len(self.connections) - self._options.max_connections
        self._spare = num_beyond > 0
        if num_beyond > NUM_SPARE_CONNECTIONS:
            transport.abort()
        else:
            self._mind_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn tells `cycle` alone, which may only wait behind it
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._cancel_client_timer()
        self._cancel_write_timer()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        num_before = self._num_boundaries
        super().data_received(data)
        if self._awaits_headers and self._num_boundaries == num_before:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(_headers_too_large())
        self._mind_client()

    # ---------------------------------------------------------------------------------- the parser's calls
    def on_headers_complete(self) -> None:
        """A request begins: it is answered, or refused for what its headers or its connection are."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise TooManyPipelined
        refusal = self._refusal()
        self.app = self.config.loaded_app if refusal is None else self._refusing_app(refusal)
        super().on_headers_complete()
        if refusal is not None:
            self.cycle.keep_alive = False
        if not self.pipeline:
            self._answered = self.cycle
        self._num_boundaries += 1
        self._awaits_headers, self._header_bytes = False, 0
        self._cancel_client_timer()

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._num_boundaries += 1
        self._awaits_headers = True
        self._cancel_client_timer()
        super().on_message_complete()

    def _refusing_app(self, refusal: RequestError) -> ASGIApp:
        request_id = request_id_of(self.headers)
        self._tell(refusal, request_id)
        response = error_response(refusal)
        response.headers[HEADER] = request_id.decode()
        return response

    def _tell(self, refusal: RequestError, request_id: bytes) -> None:
        """With --log-requests, as the app does for what reaches it."""
        if self._log_requests:
            event("request", request_id=request_id.decode(), client=self.client, status=refusal.status)

    def _refusal(self) -> RequestError | None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            return _headers_too_large()
        most = self._options.max_connections
        if self._spare and len(self.connections) > most and self.url.partition(b"?")[0] not in PROBES:
            return RequestError(f"there are already {most} connections, as many as may be", status=503)
        return None

    # --------------------------------------------------------------------------------------- slow requests
    @property
    def _answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _mind_client(self) -> None:
        """Whenever the next thing that should come is the client's, it has a limited time for that."""
        if self._client_timer is not None or self.transport.is_closing():
            return
        if not self._awaits_headers:
            self._client_timer = self.loop.call_later(self._options.body_timeout_s, self._body_is_late)
        elif not self._answering:
            self._client_timer = self.loop.call_later(self._options.header_timeout_s, self._headers_are_late)

    def _cancel_client_timer(self) -> None:
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None

    def _headers_are_late(self) -> None:
        self._client_timer = None
        if self._header_bytes:
            limit = f"{self._options.header_timeout_s:g} s"
            self._refuse(RequestError(f"the headers did not arrive within {limit}", status=408))
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        self._client_timer = None
        if self.pipeline:
            self._mind_client()  # it is not read before the requests ahead of it are answered
        else:
            limit = f"{self._options.body_timeout_s:g} s"
            self._refuse(RequestError(f"the body did not arrive within {limit}", status=408))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what it cannot parse."""
        self._refuse(RequestError("this is not a valid HTTP request"))

    def _refuse(self, error: RequestError) -> None:
        """Answer what has not come completely, and hang up. Inside another answer there is only hanging up."""
        if self._awaits_headers:
            unanswered = not self._answering
        else:
            unanswered = self._answered is self.cycle and not self.cycle.response_started
        if unanswered:
            request_id = request_id_of(() if self._awaits_headers else self.headers)
            self._tell(error, request_id)
            body = msgspec.json.encode(error_body(error))
            head = (
                f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"{HEADER}: {request_id.decode()}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self._watch_writing()
        elif self._answering:
            self.transport.abort()
        self.transport.close()

    # --------------------------------------------------------------------------------------- slow responses
    def pause_writing(self) -> None:
        """The client is slower than its response: the app waits in `send` from now on."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        super().resume_writing()
        if self._is_added_to:
            self._cancel_write_timer()
        else:
            self._watch_writing()  # what is left of an answer

    def on_response_complete(self) -> None:
        """The app has written all; the client may not have taken all of it."""
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        self._watch_writing()

    @property
    def _is_added_to(self) -> bool:
        """True while the app may write: what waits then may be as much as before although some was taken."""
        return self._answering and not self.flow.write_paused and not self.transport.is_closing()

    def _watch_writing(self) -> None:
        """From now on something has to be taken within --write-timeout-s."""
        self._cancel_write_timer()
        self._write_timer = self.loop.call_later(
            self._options.write_timeout_s, self._look_at_buffer, self.transport.get_write_buffer_size()
        )

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _look_at_buffer(self, num_before: int) -> None:
        """While there is something to take, a client that has taken none of it since the last look is dropped."""
        self._write_timer = None
        num_buffered = self.transport.get_write_buffer_size()
        if num_buffered == 0 or self._is_added_to:
            return
        if num_buffered == num_before:
            event("client_takes_nothing", client=self.client, num_bytes=num_buffered)
            self.transport.abort()
        else:
            self._watch_writing()


def _headers_too_large() -> RequestError:
    return RequestError(f"the headers are larger than {MAX_HEADER_BYTES} bytes", status=431)
