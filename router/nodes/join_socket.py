"""The control port, on which nodes announce themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from shared.errors import ConfigError
from shared.log import LimitedWarning
from shared.protocol.dial_socket import bound_strangers, from_frames
from shared.protocol.messages import FRAME_ERRORS, Announcement

if TYPE_CHECKING:
    from shared.protocol.security import FleetKey

_decoder = msgspec.msgpack.Decoder(Announcement)

JoinListener = Callable[[Announcement], None]


class JoinSocket:
    """A bound ROUTER socket, on which nothing is answered."""

    def __init__(self, context: zmq.asyncio.Context, fleet_key: FleetKey | None) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        bound_strangers(self._socket)
        self._dropped = LimitedWarning("announcement_dropped")
        if fleet_key is not None:
            fleet_key.secure_server(self._socket)

    def bind(self, host: str, port: int) -> int:
        """Listen on a port (0: a free one), and return it. Raises ConfigError."""
        bracketed = f"[{host}]" if ":" in host else host
        if ":" in host:
            self._socket.ipv6 = True
        try:
            self._socket.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as e:
            raise ConfigError(f"the control port {host}:{port} cannot be bound: {e.strerror}") from e
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    async def listen(self, listener: JoinListener) -> None:
        """Pass every announcement to `listener`, for ever."""
        while True:
            _, *frames = await self._socket.recv_multipart()
            try:
                message = _decoder.decode(from_frames(frames))
            except FRAME_ERRORS as e:
                self._dropped(reason=e)
                continue
            listener(message)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
