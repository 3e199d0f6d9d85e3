"""The supervisor's messages to a router, on the router's standard input, each behind its length.

The supervisor owns the control port, starts the nodes of this machine, and runs discoveries. It passes all
announcements, the ends of its nodes, and what is discovered to every router. Nothing is answered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec

from shared.log import crash, event
from shared.protocol.messages import Announcement, Role, Struct


class NodeExited(Struct, frozen=True):
    """A node of this machine has ended, and will be started again. It has not `crashed` if its exit code was 0."""

    node_id: str
    role: Role
    reason: str
    crashed: bool


class Listed(Struct, frozen=True):
    """What discoveries list now: the address of each node."""

    addresses: tuple[str, ...]


class LogKey(Struct, frozen=True):
    """Hash the prefixes of --log-requests under this key, as all routers of this supervisor do."""

    key: bytes


ToRouter = Announcement | NodeExited | Listed | LogKey

_LENGTH_NBYTES = 4
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRouter] = msgspec.msgpack.Decoder(ToRouter)


def encode(message: ToRouter) -> bytes:
    """A frame for `FeedThread`."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_NBYTES, "little") + body


class FeedThread(threading.Thread):
    """Reads frames from a file descriptor, and ends the process at the descriptor's end: the supervisor is gone then.

    It is a thread, so that a router whose event loop hangs ends with its supervisor too.
    """

    def __init__(self, fd: int, on_message: Callable[[ToRouter], object]) -> None:
        super().__init__(name="supervisor's feed", daemon=True)
        self._fd = fd
        self._on_message = on_message

    def run(self) -> None:
        """Call `on_message` on this thread, for ever."""
        try:
            while True:
                length = int.from_bytes(self._read(_LENGTH_NBYTES), "little")
                self._on_message(_decoder.decode(self._read(length)))
        except OSError as e:
            event("supervisor_gone", reason=e)
        except Exception:
            crash("feed_failed")
        finally:
            os._exit(1)

    def _read(self, nbytes: int) -> bytes:
        read = b""
        while len(read) < nbytes:
            part = os.read(self._fd, nbytes - len(read))
            if not part:
                raise ConnectionError("the feed has ended")
            read += part
        return read
