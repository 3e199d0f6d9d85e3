"""Answers as JSON and event streams, errors, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from router.http.answer import Answer
from shared.errors import RequestError
from shared.log import crash

T = TypeVar("T")

_EVENT_STREAM = (
    "Server-sent events; the schema is that of one event. The last one's data is [DONE]; a failure in mid-stream is "
    "an ErrorAnswer before it."
)
ERROR = "request_error"
"""The key of a request's error in the state of its scope."""

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

    message: Annotated[str, Field(description="Names field, value and bound.")]
    type: Annotated[str, Field(description="The kind of error, such as invalid_request_error.")]
    code: Annotated[str | None, Field(description="The name of what is wrong, where it has one.")]
    param: Annotated[str | None, Field(description="The field at fault, where it is one.")]


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


def error_response(error: RequestError) -> Response:
    """A refusal or failure as an HTTP response."""
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = str(error.retry_after_s or 1)
    return json_response(error_body(error), error.status, headers)


async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error, from a middleware."""
    note_error(scope, error)
    await error_response(error)(scope, receive, send)


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


async def stream_response(request: Request, events: AsyncGenerator[object, None]) -> Response:
    """A stream of the events. An error before the first event is an ordinary error response.

    A source may end without any event.
    """
    try:
        first = await while_connected(request.receive, anext(events, None))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


def event_stream(event: Any) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can answer with events of this type (`openapi.py` adds the type itself)."""
    kinds = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (event, ErrorAnswer)]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    schema = {
        "type": "object",
        "description": _EVENT_STREAM,
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
    return {200: {"content": {EventStream.media_type: {"schema": schema}}}}


class EventStream(Response):
    """Server-sent events. The source is closed, which ends its requests, as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: object | None, events: AsyncGenerator[object, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

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
            await _send_event(send, self._first)
        try:
            async for event in self._events:
                await _send_event(send, event)
        except RequestError as e:
            await _send_event(send, error_body(e))
        except (ClientDisconnect, OSError):
            raise
        except Exception:
            crash("stream_failed")
            await _send_event(send, error_body(RequestError("internal error", status=500)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_event(send: Send, event: object) -> None:
    body = b"data: " + msgspec.json.encode(event) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
