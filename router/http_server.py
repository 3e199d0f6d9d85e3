"""uvicorn, set up for this process: a socket that is bound before anything else, and no signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from router.config import ConnectionOptions
from router.http_protocol import BoundedHttpProtocol
from router.open_files import room_for
from shared.errors import ConfigError

_DRAIN_S = 5


class HttpServer(uvicorn.Server):
    """Leaves signals to the process that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    @property
    def num_connections(self) -> int:
        """Clients that are connected, busy or not."""
        return len(self.server_state.connections)

    @property
    def num_unsent_bytes(self) -> int:
        """What clients have not taken yet of what was written for them; the kernel's buffers not counted."""
        connections = cast("Iterable[BoundedHttpProtocol]", self.server_state.connections)
        return sum(connection.transport.get_write_buffer_size() for connection in connections)


def http_server(app: ASGIApp, options: ConnectionOptions) -> HttpServer:
    """A server for `app`, to be run on a socket of `bind_http`."""
    options = replace(options, max_connections=room_for(options.max_connections))
    protocol = functools.partial(BoundedHttpProtocol, options=options)
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
    return HttpServer(config)


def bind_http(host: str, port: int) -> socket.socket:
    """Before any node is started, so that a port in use is found at once. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as e:
        raise ConfigError(f"--host {host}: {e.strerror}") from e
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        raise ConfigError(f"{host}:{port} cannot be bound: {e.strerror}; choose another --port") from e
    return bound
