"""Accepts the connections of HTTPS, with the bounds that those of HTTP have.

A server of the event loop tells of a connection when its handshake is over. Until then it would be in no count, and
open for a minute.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial

from router.http.connection import NUM_SPARE_CONNECTIONS, Connection, Connections
from shared.log import LimitedWarning

_BACKLOG = 2048
_NO_DESCRIPTOR_PAUSE_S = 0.5


class TlsListener:
    """Accepts on `sock`, from now on until `close`. OSError: it cannot listen.

    A handshake may take `header_timeout_s`, and counts as a connection.
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
        handshake.add_done_callback(partial(self._shaken, client, connection))

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
