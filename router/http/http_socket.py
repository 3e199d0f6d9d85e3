"""The HTTP socket: of one process, or of several that share a port."""

from __future__ import annotations

import socket

from shared.errors import ConfigError

_BACKLOG = 2048
"""As uvicorn's default: connections that the kernel keeps until they are accepted."""


def listen_http(host: str, port: int) -> socket.socket:
    """The listening socket of one process, made before nodes start so that a port in use is found. ConfigError.

    The kernel lets two processes bind one port while neither listens, and only `listen` fails, so it is called here.
    """
    bound = bind_http(host, port)
    start_listening(bound)
    return bound


def start_listening(bound: socket.socket) -> None:
    """Listen: clients may connect, and wait until they are accepted. Closes it and raises ConfigError on failure."""
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(_BACKLOG)
    except OSError as e:
        bound.close()
        raise _cannot_bind(host, port, e) from e


def bind_http(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError.

    Other processes of this user may bind the port too if all of them set `shared`. The kernel spreads connections
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
    """Keep a port for sockets that share it. This one never listens, so it gets no connection. Raises ConfigError."""
    reserved = bind_http(host, port)  # not shared at first, so that a process that listens there is found
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"{host}:{port} cannot be bound: {error.strerror}; choose another --port")
