"""Answers as JSON and event streams, errors, and work that ends when its client disconnects.

Every answer has an `x-request-id`; that of a client or proxy is the rid of the request. While it runs, no other
request may have this rid in its body. Requests may share a request id, since proxies repeat it when they retry or
hedge; /abort_request with that id ends all of them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.answer import Answer
from shared.errors import RequestError
from shared.log import crash

T = TypeVar("T")

_EVENT_STREAM = (
    "Server-sent events; the schema is that of one event. The last one's data is [DONE]; a failure in mid-stream is "
    "an ErrorAnswer before it."
)
TYPES = "x-types"
"""The key of the schemas of all types in the description of a response."""
ANTHROPIC_PATH = "/v1/messages"
ERROR = "request_error"
"""The key of a request's error in the state of its scope."""

HEADER = "x-request-id"
_HEADER = HEADER.encode()
_VALID = re.compile(rb"[!-~]{1,200}")
"""Visible ASCII, so short that it is a valid rid with a number appended."""

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "timeout_error",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorDetail(Answer, kw_only=True, frozen=True):
    """The parts of an error."""

    message: Annotated[str, Meta(description="Names field, value and bound.")]
    type: Annotated[str, Meta(description="The kind of error, such as invalid_request_error.")]
    code: Annotated[str | None, Meta(description="The name of what is wrong, where it has one.")]
    param: Annotated[str | None, Meta(description="The field at fault, where it is one.")]


class ErrorAnswer(Answer, kw_only=True, frozen=True):
    """A refusal or a failure, in either dialect; in a stream, the event before `[DONE]`."""

    error: ErrorDetail


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON."""
    return Response(
        msgspec.json.encode(content), status_code=status, media_type="application/json", headers=headers
    )


def error_body(error: RequestError) -> ErrorAnswer:
    """The one shape of all errors; a superset of what either dialect needs."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return ErrorAnswer(
        error=ErrorDetail(message=error.message, type=kind, code=error.code, param=error.param)
    )


@dataclass(frozen=True)
class StreamForm:
    """How a dialect writes a stream: each event named by its `type` or not, an error in the middle, and the end."""

    names_events: bool
    error: Callable[[RequestError], object]
    end: bytes = b""

    def encode(self, event: Any) -> bytes:
        """An event."""
        data = b"data: %b\n\n" % msgspec.json.encode(event)
        return f"event: {event['type']}\n".encode() + data if self.names_events else data


DATA_ONLY = StreamForm(names_events=False, error=error_body, end=b"data: [DONE]\n\n")
"""Of OpenAI's older routes, and of SGLang's."""


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """An error as the routes under ANTHROPIC_PATH write it."""
    kind = {503: "overloaded_error", 408: "timeout_error", 415: "invalid_request_error"}.get(error.status)
    kind = kind or _ERROR_TYPES.get(
        error.status, "api_error" if error.status >= 500 else "invalid_request_error"
    )
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: RequestError, path: str = "") -> Response:
    """A refusal or failure as an HTTP response, in the form of the dialect of this `path`."""
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = str(error.retry_after_s or 1)
    body = anthropic_error(error) if path.startswith(ANTHROPIC_PATH) else error_body(error)
    return json_response(body, error.status, headers)


async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error, from a middleware."""
    note_error(scope, error)
    await error_response(error, scope["path"])(scope, receive, send)


def note_error(scope: Scope, error: RequestError) -> None:
    """Keep the error of a request for --log-requests."""
    scope.setdefault("state", {})[ERROR] = error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientDisconnect then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        either: set[asyncio.Future[Any]] = {working, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def stream_response(
    request: Request, events: AsyncGenerator[object, None], form: StreamForm = DATA_ONLY
) -> Response:
    """A stream of the events. An error before the first event is an ordinary error response.

    A source may end without any event.
    """
    try:
        first = await while_connected(request.receive, anext(events, None))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, form)


def answers(kind: Any = None, *, event: Any = None) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with JSON of the type `kind`, with events of the type `event`, or both.

    A schema refers to the types that it is made of. They are under TYPES, from where `openapi.py` moves them.
    """
    kinds = [*filter(None, (kind, event)), ErrorAnswer]
    schemas, types = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    content = {"application/json": {"schema": schemas[0]}} if kind is not None else {}
    if event is not None:
        data = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": schemas[-2:]},
        }
        schema = {
            "type": "object",
            "description": _EVENT_STREAM,
            "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
            "required": ["data"],
        }
        content[EventStream.media_type] = {"schema": schema}
    return {200: {"content": content, TYPES: types}}


class EventStream(Response):
    """Server-sent events. The source is closed, which ends its requests, as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: object | None, events: AsyncGenerator[object, None], form: StreamForm) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client disconnects."""
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            pass  # the client is gone, so there is nothing to send
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._first is not None:
            await self._send(send, self._first)
        encode = self._form.encode
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": encode(event), "more_body": True})
        except RequestError as e:
            await self._send(send, self._form.error(e))
        except (ClientDisconnect, OSError):
            raise
        except Exception:
            crash("stream_failed")
            await self._send(send, self._form.error(RequestError("internal error", status=500)))
        await send({"type": "http.response.body", "body": self._form.end, "more_body": False})

    async def _send(self, send: Send, event: object) -> None:
        await send({"type": "http.response.body", "body": self._form.encode(event), "more_body": True})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ------------------------------------------------------------------------ what every answer passes
class RequestIds:
    """Middleware: answers with the request's id, or with a random one if the request has no valid id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a valid header or none, and the id in `scope["state"]["request_id"]`."""
        request_id = request_id_of(scope["headers"])
        scope["headers"] = [item for item in scope["headers"] if item[0] != _HEADER or item[1] == request_id]
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_HEADER, request_id)]
            return send(message)

        await self._app(scope, receive, send_with_id)


class HeadAsGet:
    """Middleware: the routes see a GET. An endless answer ends with its headers, as if its client had left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and of the answer to a HEAD only its start."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body"})

        await self._app({**scope, "method": "GET"}, receive, send_start)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's request id, or a random one if the headers have no valid id."""
    given = [value for name, value in headers if name == _HEADER]
    return given[0] if len(given) == 1 and _VALID.fullmatch(given[0]) else secrets.token_hex(16).encode()
