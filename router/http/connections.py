"""The ASGI side of connections: each request is served by its connection, and a spare one serves probes alone."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.connection import STATE, Connection
from router.http.responses import error_response, note_error
from shared.errors import RequestError

PROBES = ("/health", "/metrics")
"""Paths that are answered on a spare connection."""


def on_connections(app: ASGIApp) -> ASGIApp:
    """`app`, with each request served by its connection."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"][STATE]
        await connection.serve(app, scope, receive, send)

    return serve


class SpareConnectionGate:
    """Middleware: a spare connection answers probes, and 503 to all other requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 503 and close the connection."""
        connection: Connection = scope["state"][STATE]
        if not connection.is_beyond_the_bound or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        most = connection.options.max_connections
        refusal = RequestError(f"there are already {most} connections, as many as may be", status=503)
        note_error(scope, refusal)
        response = error_response(refusal)
        response.headers["connection"] = "close"
        await response(scope, receive, send)
