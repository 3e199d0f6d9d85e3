"""Messages between a parent and one worker: a socket pair that the worker inherits.

It has no name that another user of the machine could find, and it ends with either process, however that dies.
Messages are msgpack behind their length, four bytes, little-endian.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from shared.errors import LinkError
from shared.protocol.messages import Struct

M = TypeVar("M")

_LENGTH_NBYTES = 4
_MAX_UNSENT_BYTES = 64 << 20

_encoder = msgspec.msgpack.Encoder()


class BusEnd(Generic[M]):
    """One end; what arrives is an `M`. Use on one event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[M]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> BusEnd[M]:
        """Take over `end`; `kind` is the union M."""
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, msgspec.msgpack.Decoder(kind))

    def send(self, message: Struct) -> None:
        """Queue a message. Raises LinkError when the other end does not read; that it is gone, `receive` notices."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise LinkError(f"{_MAX_UNSENT_BYTES} bytes wait to be read")
        frame = _encoder.encode(message)
        self._writer.write(len(frame).to_bytes(_LENGTH_NBYTES, "little") + frame)

    async def receive(self) -> M:
        """The next message. Raises LinkError when the other end is gone."""
        try:
            length = await self._reader.readexactly(_LENGTH_NBYTES)
            return self._decoder.decode(await self._reader.readexactly(int.from_bytes(length, "little")))
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            raise LinkError("the other end is gone") from e

    async def close(self) -> None:
        """Send what is queued, and hang up."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the other end was first
