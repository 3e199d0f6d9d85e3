"""uvicorn on sockets that listen already, without signal handlers; HTTPS with the bounds that HTTP has."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from router.http.config import ConnectionOptions
from router.http.connection import NUM_SPARE_CONNECTIONS, Connection, Connections
from shared.log import LimitedWarning, warn
from shared.open_files import raise_open_files_limit

_DRAIN_S = 5
_BACKLOG = 2048
_NO_DESCRIPTOR_PAUSE_S = 0.5
_NOT_CLIENTS = 512
"""Open files that are not clients: listeners, nodes (about five each), the model's files and libraries."""


class HttpServer(uvicorn.Server):
    """A server without signal handlers. `accepting` is set once clients can connect."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(config)
        self.connections = connections
        self._tls = tls
        self._tls_listeners: list[TlsListener] = []
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start. Raises OSError for a socket that does not listen then, which uvloop only logs."""
        await super().startup(sockets if self._tls is None else [])
        if self._tls is not None:
            new_connection = functools.partial(
                Connection,
                self.config,
                self.server_state,
                self.lifespan.state,
                connections=self.connections,
            )
            for given in sockets or ():
                listener = TlsListener(given, self._tls, new_connection, self.connections)
                self._tls_listeners.append(listener)
        for given in sockets or ():
            closed = given.fileno() < 0  # as uvloop does when `listen` fails
            if closed or not given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("the HTTP port does not listen: is another router on it?")
        self.accepting.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end the connections."""
        for listener in self._tls_listeners:
            listener.close()
        await super().shutdown(sockets)


def http_server(
    app: ASGIApp, options: ConnectionOptions, *, log_requests: bool, tls: ssl.SSLContext | None = None
) -> HttpServer:
    """A server for `app`, to be run on a socket of `http_socket` that listens. `tls` makes it HTTPS."""
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
    return HttpServer(config, connections, tls)


def room_for(max_connections: int) -> int:
    """Raise the limit on open files; returns how many of `max_connections` it allows."""
    open_files = raise_open_files_limit()
    possible = max(1, open_files - _NOT_CLIENTS)
    if possible >= max_connections:
        return max_connections
    warn("max_connections_limited", asked=max_connections, possible=possible, open_files_limit=open_files)
    return possible


class TlsListener:
    """Accepts the connections of HTTPS on `sock`, from now on until `close`. OSError: it cannot listen.

    A handshake may take `header_timeout_s`, and counts as a connection. A server of the event loop tells of a
    connection when its handshake is over; until then it would be in no count, and open for a minute.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        new_connection: Callable[[], Connection],
        connections: Connections,
    ) -> None:
        self._socket = sock
        self._context = context
        self._new_connection = new_connection
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._warn = LimitedWarning("http_accept_failed")
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        self._go_on()

    def close(self) -> None:
        """Accept no more, and give up handshakes. Connections go on."""
        self._loop.remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has left already
            return
        except OSError as error:  # no descriptor is left; the connection waits, so the socket stays readable
            self._warn(reason=error)
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(_NO_DESCRIPTOR_PAUSE_S, self._go_on)
            return
        if len(self._connections) >= self._connections.options.max_connections + NUM_SPARE_CONNECTIONS:
            client.close()
            return
        client.setblocking(False)
        connection = self._new_connection()
        self._connections.shaking.add(connection)
        handshake = self._loop.create_task(self._shake(client, connection))
        self._handshakes.add(handshake)
        handshake.add_done_callback(functools.partial(self._shaken, client, connection))

    async def _shake(self, client: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                client,
                ssl=self._context,
                ssl_handshake_timeout=self._connections.options.header_timeout_s,
            )
        except OSError:  # it speaks no TLS, has no certificate, is too slow, or has left
            client.close()

    def _shaken(self, client: socket.socket, connection: Connection, handshake: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        self._connections.shaking.discard(connection)
        if handshake.cancelled():
            client.close()
        if connection not in self._connections.open:
            del connection.parser  # it refers to the connection, so nothing would free the two
