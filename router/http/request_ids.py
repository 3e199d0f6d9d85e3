"""`x-request-id`: every answer has one, and a client's or proxy's is the rid of the request.

While a request runs, no other may have the same rid in its body. Requests may share a request id, since proxies
repeat it when they retry or hedge; /abort_request with that id ends all of them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        scope["headers"] = [item for item in scope["headers"] if item[0] != _HEADER or item[1] == request_id]
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_HEADER, request_id)]
            return send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's request id, or a random one if the headers have no valid id."""
    given = [value for name, value in headers if name == _HEADER]
    return given[0] if len(given) == 1 and _VALID.fullmatch(given[0]) else secrets.token_hex(16).encode()


def requested_rid(rid: str | list[str] | None, headers: Mapping[str, str]) -> str | list[str] | None:
    """The body's rid, or else the request id; None if the client gave neither."""
    return rid if rid is not None else headers.get(HEADER)
