"""Refuses a request without exactly one Host, which a proxy and this server could read differently."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.responses import refuse
from shared.errors import RequestError


class HostCheck:
    """Middleware: HTTP/1.1 needs exactly one `Host` (RFC 9112, 3.2); HTTP/1.0 may have none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400."""
        if scope["type"] == "http":
            num_hosts = sum(name == b"host" for name, _ in scope["headers"])
            if num_hosts > 1 or (num_hosts == 0 and scope["http_version"] == "1.1"):
                refusal = RequestError(f"the request has {num_hosts} Host headers; one is needed")
                await refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)
