"""`x-request-id`: every answer has one, and what a client or a proxy has given is the rid of the request.

A rid in the body is a claim: while it runs, no other request may have the same. A request id is only a label, since
proxies repeat it when they retry while the first attempt is still dying, or hedge: requests may share it, and
/abort_request with it ends them all.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_HEADER = HEADER.encode()
_VALID = re.compile(rb"[!-~]{1,200}")
"""Visible ASCII; short enough to be numbered and still be a rid."""


class RequestIds:
    """Middleware: answers with the request's id, or a random one in place of none or one that is not valid."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whoever is inside finds a valid header or none, and the id in `scope["state"]["request_id"]`."""
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
    """The client's, or a random one in place of none or one that is not valid."""
    given = [value for name, value in headers if name == _HEADER]
    return given[0] if len(given) == 1 and _VALID.fullmatch(given[0]) else secrets.token_hex(16).encode()


def requested_rid(rid: str | list[str] | None, headers: Mapping[str, str]) -> str | list[str] | None:
    """The body's rid, or else the request id, if the client gave either."""
    return rid if rid is not None else headers.get(HEADER)
