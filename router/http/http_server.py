"""uvicorn on sockets that listen already, without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from router.http.config import ConnectionOptions
from router.http.connection import Connection, Connections
from shared.log import warn
from shared.open_files import raise_open_files_limit

_DRAIN_S = 5
_NOT_CLIENTS = 512
"""Open files that are not clients: listeners, nodes (about five each), the model's files and libraries."""


class HttpServer(uvicorn.Server):
    """A server without signal handlers. `accepting` is set once clients can connect."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.connections = connections
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start. Raises OSError for a socket that does not listen then, which uvloop only logs."""
        await super().startup(sockets)
        for given in sockets or ():
            closed = given.fileno() < 0  # as uvloop does when `listen` fails
            if closed or not given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("the HTTP port does not listen: is another router on it?")
        self.accepting.set()


def http_server(app: ASGIApp, options: ConnectionOptions, *, log_requests: bool) -> HttpServer:
    """A server for `app`, to be run on a socket of `http_socket` that listens."""
    options = replace(options, max_connections=room_for(options.max_connections))
    connections = Connections(options, log_requests=log_requests)
    protocol = functools.partial(Connection, connections=connections)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        log_config=None,
        log_level="error",  # uvicorn warns of each client that does not speak HTTP
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=options.keep_alive_timeout_s,
        timeout_graceful_shutdown=_DRAIN_S,
    )
    return HttpServer(config, connections)


def room_for(max_connections: int) -> int:
    """Raise the limit on open files; returns how many of `max_connections` it allows."""
    open_files = raise_open_files_limit()
    possible = max(1, open_files - _NOT_CLIENTS)
    if possible >= max_connections:
        return max_connections
    warn("max_connections_limited", asked=max_connections, possible=possible, open_files_limit=open_files)
    return possible
