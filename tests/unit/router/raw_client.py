"""HTTP as bytes on a socket: what a well-behaved client would never send, and what exactly comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from router.config import ConnectionOptions
from tests.patience import PATIENCE_S

PATIENT = ConnectionOptions(
    header_timeout_s=6000, body_timeout_s=6000, write_timeout_s=6000, keep_alive_timeout_s=6000
)
"""No timer of a connection ends within a test: one that holds the connection fails it."""
GENERATE: dict[str, object] = {"text": "a fox", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
STREAM = {**GENERATE, "stream": True}
CHUNKED = "POST /generate HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n"


@dataclass(frozen=True)
class Answer:
    """A response with a Content-Length, or with chunks put together."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """Of an error, in the one shape that all have."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class RawClient:
    """One connection. Whatever is awaited comes within PATIENCE_S, or the test fails."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, data: str | bytes) -> None:
        """Written as it is; "\\n" in a string stands for CRLF."""
        if not self.writer.is_closing():  # else the router has hung up, which a read tells
            self.writer.write(data.replace("\n", "\r\n").encode() if isinstance(data, str) else data)

    async def send_in_pieces(self, data: str, num_bytes: int) -> None:
        """`send`, so many bytes at a time, until all is sent or the server has hung up."""
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(data), num_bytes):
                self.send(data[start : start + num_bytes])
                await self.writer.drain()
                await asyncio.sleep(0)

    async def answer(self) -> Answer:
        """The next response."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            if headers.get("transfer-encoding") == "chunked":
                body = b"".join([chunk async for chunk in self.chunks()])
            else:
                body = await self._reader.readexactly(int(headers.get("content-length", 0)))
            return Answer(int(head[0].split()[1]), headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Of a chunked body whose headers were read."""
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    async def read_until(self, end: bytes) -> bytes:
        """Everything up to these bytes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(end)

    async def closed(self) -> bytes:
        """Wait until the server has hung up; what came before that."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""


@contextlib.asynccontextmanager
async def raw_client(port: int, *, buffer_bytes: int = 1 << 20) -> AsyncIterator[RawClient]:
    """A connection that is closed at the end. It reads ahead by itself, but only about `buffer_bytes`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=buffer_bytes)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def post(path: str, body: object, *, headers: str = "", version: str = "1.1") -> bytes:
    """The bytes of a POST; `headers` end with a line feed each."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\nHost: a\nContent-Length: {len(content)}\n{headers}\n"
    return head.replace("\n", "\r\n").encode() + content
