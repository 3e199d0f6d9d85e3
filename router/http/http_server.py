"""The HTTP server: uvicorn's connections on sockets that listen already."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Sequence
from dataclasses import replace
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from router.config import ConnectionOptions
from router.http.connection import Connection, Connections
from shared.log import warn
from shared.open_files import raise_open_files_limit

_DRAIN_S = 5.0
_DRAIN_POLL_S = 0.01
_DATE_S = 1.0
"""Of the header `date`."""
_NOT_CLIENTS = 512
"""Open files that are not clients: listeners, nodes (about five each), the model's files and libraries."""


class HttpServer:
    """uvicorn's connections on sockets that listen already: `start`, and then `serve` until `stop`.

    uvicorn's own Server takes signals, and sleeps for tenths of a second before it stops.
    """

    def __init__(self, app: ASGIApp, options: ConnectionOptions, *, log_requests: bool) -> None:
        options = replace(options, max_connections=room_for(options.max_connections))
        self.connections = Connections(options, log_requests=log_requests)
        self._config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # uvicorn warns of each client that does not speak HTTP
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=options.keep_alive_timeout_s,
        )
        self._config.load()
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._stopping = asyncio.Event()

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept clients. Raises OSError for a socket that does not listen, which uvloop only logs."""
        connection = functools.partial(
            Connection, self._config, self._state, app_state={}, connections=self.connections
        )
        loop, backlog = asyncio.get_running_loop(), self._config.backlog
        for sock in sockets:
            self._servers.append(await loop.create_server(connection, sock=sock, backlog=backlog))
            closed = sock.fileno() < 0  # as uvloop does when `listen` fails
            if closed or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("the HTTP port does not listen: is another router on it?")

    async def serve(self) -> None:
        """Answer until `stop`."""
        while not self._stopping.is_set():
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DATE_S)
        for server in self._servers:
            server.close()
        await self._end_connections()

    def stop(self) -> None:
        """Accept no more, and end the connections, those with an answer under way after it."""
        self._stopping.set()

    async def _end_connections(self) -> None:
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while self._state.connections or self._state.tasks:
                    await asyncio.sleep(_DRAIN_POLL_S)
        for task in self._state.tasks:
            task.cancel()


def room_for(max_connections: int) -> int:
    """Raise the limit on open files; returns how many of `max_connections` it allows."""
    open_files = raise_open_files_limit()
    possible = max(1, open_files - _NOT_CLIENTS)
    if possible >= max_connections:
        return max_connections
    warn("max_connections_limited", asked=max_connections, possible=possible, open_files_limit=open_files)
    return possible
