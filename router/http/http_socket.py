"""The socket that clients connect to: for one process alone, or for several that listen on the same port."""

from __future__ import annotations

import socket

from shared.errors import ConfigError

_BACKLOG = 2048
"""As uvicorn's default: connections that the kernel keeps until they are accepted."""


def listen_http(host: str, port: int) -> socket.socket:
    """For one process alone, before any node is started: a port in use is found at once. Raises ConfigError.

    It listens from here on: as long as nobody listens, the kernel lets two processes bind one port, and only
    `listen` tells the second that it has come too late.
    """
    bound = bind_http(host, port)
    start_listening(bound)
    return bound


def start_listening(bound: socket.socket) -> None:
    """Clients may connect; they wait until they are accepted. Closes it and raises ConfigError when it cannot."""
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(_BACKLOG)
    except OSError as e:
        bound.close()
        raise _cannot_bind(host, port, e) from e


def bind_http(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that does not listen yet. Raises ConfigError.

    Other processes of this user may bind the port as well if all have it `shared`; the kernel spreads connections
    over those that listen.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as e:
        raise ConfigError(f"--host {host}: {e.strerror}") from e
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        raise _cannot_bind(host, port, e) from e
    return bound


def reserve_http(host: str, port: int) -> socket.socket:
    """Keep a port for sockets that share it; this one never listens, so it is given no connection. ConfigError."""
    reserved = bind_http(host, port)  # not shared at first: whoever listens there already is noticed
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"{host}:{port} cannot be bound: {error.strerror}; choose another --port")
