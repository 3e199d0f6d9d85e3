"""What stands before the routes: ids of requests, the size of bodies, and HEAD.

Every answer has an `x-request-id`; that of a client or proxy is the rid of the request. While it runs, no other
request may have this rid in its body. Requests may share a request id, since proxies repeat it when they retry or
hedge; /abort_request with that id ends all of them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Iterable, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.responses import refuse
from router.http.wording import shown
from shared.errors import RequestError

HEADER = "x-request-id"
_HEADER = HEADER.encode()
_VALID = re.compile(rb"[!-~]{1,200}")
"""Visible ASCII, so short that it is a valid rid with a number appended."""


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


class JsonBodies:
    """Middleware: a body has at most `max_bytes`, is not compressed, and is JSON whatever its content-type is.

    `connection.py` bounds the time of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413 or 415. `receive` raises for a body that turns out too large."""
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        declared = headers.get("content-length", "")
        too_large = f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)"
        if encoding not in ("", "identity"):
            why = f"the body has the content-encoding {shown(encoding)}; send it as it is"
            await refuse(RequestError(why, status=415), scope, receive, send)
            return
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            await refuse(RequestError(too_large, status=413), scope, receive, send)
            return
        # curl -d declares a form, and some clients declare nothing.
        others = [item for item in scope["headers"] if item[0] != b"content-type"]
        scope["headers"] = [*others, (b"content-type", b"application/json")]
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, too_large)
            return message

        await self._app(scope, counted, send)


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


def requested_rid(rid: str | list[str] | None, headers: Mapping[str, str]) -> str | list[str] | None:
    """The body's rid, or else the request id; None if the client gave neither."""
    return rid if rid is not None else headers.get(HEADER)
