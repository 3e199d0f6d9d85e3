"""uvicorn, set up for this process: a socket that is bound before anything else, and no signal handlers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from shared.errors import ConfigError

_DRAIN_S = 5
_KEEP_ALIVE_S = 30


class HttpServer(uvicorn.Server):
    """Leaves signals to the process that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def http_server(app: ASGIApp) -> HttpServer:
    """A server for `app`, to be run on a socket of `bind_http`."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
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
