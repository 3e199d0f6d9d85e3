"""The socket that clients connect to: for one process alone, or for several that listen on the same port."""

from __future__ import annotations

import socket

from shared.errors import ConfigError


def bind_http(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Before any node is started, so that a port in use is found at once. Raises ConfigError.

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
        raise ConfigError(f"{host}:{port} cannot be bound: {e.strerror}; choose another --port") from e
    return bound


def reserve_http(host: str, port: int) -> socket.socket:
    """Keep a port for sockets that share it; this one never listens, so it is given no connection. ConfigError."""
    reserved = bind_http(host, port)  # not shared at first: whoever listens there already is noticed
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved
