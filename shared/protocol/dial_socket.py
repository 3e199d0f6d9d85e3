"""What nodes and routers have in common of a ZeroMQ connection: how a socket is set up, watched, and bounded.

A frame is bounded before its sender has proved anything, so the bound is small, and a long message is sent as several
frames. ZeroMQ delivers all frames of a message or none. It does not bound their number: without a fleet key,
any process that reaches the port can send frames of one message until this process has no memory left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import zmq

from shared.protocol.security import FleetKey

MAX_FRAME_BYTES = 1 << 16
"""A peer that announces a larger frame, in its handshake or later, is hung up on."""
_CHUNK_BYTES = MAX_FRAME_BYTES - 1024
"""Of a message in one frame: CURVE adds a header and a code to each."""
MAX_SOCKETS = 16_384
"""Of a context that dials. ZeroMQ counts three for each `DialSocket`: the socket, and the two ends of its monitor."""
CONNECT_TIMEOUT_S = 5.0
# Turning libzmq's reconnecting off (-1) would also drop what arrived just before the connection closed.
_NEVER_MS = 10**9

LOST: Mapping[int, str] = {
    zmq.EVENT_CLOSED: "connection refused",
    zmq.EVENT_DISCONNECTED: "connection closed",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed (is it a node, with the same --fleet-key?)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed: not the same protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshake failed: not the same --fleet-key",
}
"""Events of a dialled socket's monitor after which it will never be connected (again), and what they mean."""
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)

S = TypeVar("S", bound=zmq.Socket[Any])


def bound_strangers(sock: zmq.Socket[Any], timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Bound what the other end of a connection may send, and how long its handshake may take."""
    sock.maxmsgsize = MAX_FRAME_BYTES
    sock.handshake_ivl = int(1000 * timeout_s)


def to_frames(message: bytes) -> list[bytes]:
    """A message cut into frames that are not too large; at least one."""
    return [message[at : at + _CHUNK_BYTES] for at in range(0, len(message), _CHUNK_BYTES)] or [b""]


def from_frames(frames: Sequence[bytes]) -> bytes:
    """The message whose frames these are."""
    return frames[0] if len(frames) == 1 else b"".join(frames)


class DialSocket(Generic[S]):
    """A DEALER socket that connects once, and its monitor. Raises ZMQError when it cannot even be made."""

    def __init__(
        self,
        context: zmq.Context[S],
        address: str,
        identity: str,
        fleet_key: FleetKey | None,
        *,
        max_queued_messages: int,
    ) -> None:
        self._address = address
        self._fleet_key = fleet_key
        with contextlib.ExitStack() as undo:
            self.socket = undo.enter_context(contextlib.closing(context.socket(zmq.DEALER)))
            self.socket.linger = 0
            self.socket.identity = identity.encode()
            self.socket.reconnect_ivl = _NEVER_MS
            self.socket.connect_timeout = int(1000 * CONNECT_TIMEOUT_S)
            self.socket.ipv6 = address.startswith("tcp://[")
            self.socket.sndhwm = self.socket.rcvhwm = max_queued_messages
            bound_strangers(self.socket)
            if fleet_key is not None:
                fleet_key.secure_client(self.socket, address)
            self.monitor = self.socket.get_monitor_socket(sum(LOST) | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            undo.callback(self._close_monitor)
            self.socket.connect(address)
            undo.pop_all()

    def seen(self, event: int) -> str | None:
        """Take an event of the monitor. Returns why the socket will never be connected (again); None: it is now."""
        if self._fleet_key is not None and event in _HANDSHAKE_FAILED:
            self._fleet_key.refused(self._address)
        return LOST.get(event)

    def close(self, linger_ms: int) -> None:
        """Close both sockets; what is queued has `linger_ms` to leave."""
        self._close_monitor()
        self.socket.close(linger_ms)

    def _close_monitor(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
