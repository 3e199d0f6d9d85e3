"""One connection to one node: a DEALER socket from a dial to its loss.

A lost connection is never resumed. The next dial has a new socket with a new identity, so neither side can take a
message of the old connection for one of the new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.dispatch.node import Loss
from shared.errors import LinkError
from shared.protocol.dial_socket import DialSocket, from_frames, to_frames
from shared.protocol.messages import (
    FRAME_ERRORS,
    PROTOCOL_VERSION,
    NodeHello,
    NodeToRouter,
    Refused,
    RouterHello,
    RouterToNode,
    other_version,
)

if TYPE_CHECKING:
    from shared.protocol.security import FleetKey

_MAX_QUEUED_MESSAGES = 20_000
_CLOSE_LINGER_MS = 200

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeToRouter)


class Refusal(LinkError):
    """One side refuses the other, and a retry soon would not change that."""


class NodeLink:
    """A dialled socket. `lost` gets the reason of its end, once. Raises LinkError when no socket can be made."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, identity: str, fleet_key: FleetKey | None
    ) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.loss: Loss | None = Loss.BROKEN
        """How the link was lost. None: the connection was closed, and why is not known."""
        try:
            self._sockets = DialSocket(
                context, address, identity, fleet_key, max_queued_messages=_MAX_QUEUED_MESSAGES
            )
        except zmq.ZMQError as e:
            raise LinkError(f"{address} cannot be dialled: {e.strerror}") from e
        self._watching = asyncio.create_task(self._watch(), name=f"watch {address}")

    def send(self, message: RouterToNode) -> None:
        """Queue a message. When that is impossible, the link is lost."""
        if self.lost.done():
            return
        frames = to_frames(_encoder.encode(message))
        sent = cast("asyncio.Future[object]", self._sockets.socket.send_multipart(frames, zmq.DONTWAIT))
        if sent.exception() is not None:
            self.lose(f"{_MAX_QUEUED_MESSAGES} messages wait to be sent")

    async def receive(self) -> NodeToRouter:
        """The next message. Raises LinkError for one that cannot be decoded."""
        return _decode(await self._sockets.socket.recv_multipart())

    def receive_waiting(self) -> Iterator[NodeToRouter]:
        """The messages that had arrived before the link was lost. Raises LinkError as `receive` does."""
        while True:
            frames = cast("asyncio.Future[list[bytes]]", self._sockets.socket.recv_multipart(zmq.DONTWAIT))
            if frames.exception() is not None:
                return
            yield _decode(frames.result())

    async def hello(self, incarnation: str, timeout_s: float, *, resume: bool = False) -> NodeHello:
        """Introduce this router and return the node's hello. Raises LinkError.

        With `resume`, a drained node takes work again. Messages that come before the answer are dropped: the node
        sent them to an earlier connection of this router.
        """
        self.send(RouterHello(incarnation, PROTOCOL_VERSION, resume))
        answer = asyncio.ensure_future(self._answer_to_hello())
        try:
            either: set[asyncio.Future[Any]] = {answer, self.lost}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise LinkError(
                    self.lost.result() if self.lost.done() else f"no hello within {timeout_s:g} s"
                )
            return answer.result()
        finally:
            answer.cancel()

    async def _answer_to_hello(self) -> NodeHello:
        while True:
            match await self.receive():
                case NodeHello(version=version) as hello:
                    if why := other_version("node", version):
                        raise Refusal(why)
                    return hello
                case Refused(reason):
                    raise Refusal(f"the node refused: {reason}")
            await asyncio.sleep(0)  # receive() does not suspend while messages are waiting

    def lose(self, reason: str, loss: Loss | None = Loss.BROKEN) -> None:
        """End the link with a reason. The first reason counts."""
        if not self.lost.done():
            self.loss = loss
            self.lost.set_result(reason)

    def close(self) -> None:
        """Close both sockets. Queued messages have 0.2 s to leave, unless the link is lost."""
        linger = 0 if self.lost.done() else _CLOSE_LINGER_MS
        self.lose("closed")
        self._watching.cancel()
        self._sockets.close(linger)

    async def _watch(self) -> None:
        while True:
            seen = await recv_monitor_message(self._sockets.monitor)
            reason = self._sockets.seen(seen["event"])
            if reason is not None:
                self.lose(reason, None if seen["event"] == zmq.EVENT_DISCONNECTED else Loss.BROKEN)
                return


def _decode(frames: list[bytes]) -> NodeToRouter:
    try:
        message: NodeToRouter = _decoder.decode(from_frames(frames))
        return message
    except FRAME_ERRORS as e:
        raise LinkError(f"sent a message that cannot be decoded: {e}") from e
