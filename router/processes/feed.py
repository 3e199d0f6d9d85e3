"""The supervisor's messages to a router, on the router's standard input, each behind its length.

The supervisor owns the control port, starts the nodes of this machine, and runs discoveries. It passes all
announcements, the ends of its nodes, and what is discovered to every router. Nothing is answered.
"""

from __future__ import annotations

import asyncio

import msgspec

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
    """A frame for `receive`."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_NBYTES, "little") + body


async def receive(feed: asyncio.StreamReader) -> ToRouter:
    """The next message. Raises asyncio.IncompleteReadError or ConnectionError when the supervisor is gone."""
    length = int.from_bytes(await feed.readexactly(_LENGTH_NBYTES), "little")
    return _decoder.decode(await feed.readexactly(length))
