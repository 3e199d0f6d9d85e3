"""The exchange of messages with one live node, from its hello to the end of its link."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.node import Loss
from router.nodes.node_link import LiveNode
from shared.errors import LinkError
from shared.protocol.messages import (
    Answered,
    CacheEvents,
    CacheResync,
    Draining,
    Failed,
    Leaving,
    Moved,
    MoveWanted,
    NodeHello,
    NodeToRouter,
    NotCached,
    Ping,
    Pong,
    Relay,
    RunsAlone,
    Tokens,
)

_TURN_S = 0.005
"""After so long with one node's messages the event loop serves other nodes and the streams."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations of dialling and liveness, in seconds."""

    node_timeout_s: float = 10.0
    ping_s: float = 1.0
    hello_s: float = 5.0
    redial_s: float = 1.0
    redial_refused_s: float = 5.0
    forget_s: float = 60.0
    loading_s: float = 10.0
    refresh_s: float = 0.25
    """Waiting for loads that a client has asked for."""


class NodeLost(LinkError):
    """The end of a conversation, and how it came."""

    def __init__(self, reason: str, loss: Loss) -> None:
        super().__init__(reason)
        self.loss = loss


class Conversation:
    """Receives from a node and pings it, until the link is lost, or the node is silent or leaves.

    What the node says of requests goes to the `dispatcher`, and what it says of the fleet to `on_fleet`.
    """

    def __init__(
        self,
        node: LiveNode,
        dispatcher: Dispatcher,
        timing: Timing,
        on_fleet: Callable[[Pong | Draining | Relay], None],
    ) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._timing = timing
        self._on_fleet = on_fleet

    async def run(self) -> None:
        """Run until the end of the link. Always raises a LinkError that says why."""
        link = self._node.link
        parts = [asyncio.create_task(self._receive()), asyncio.create_task(self._ping())]
        try:
            ends: set[asyncio.Future[Any]] = {*parts, link.lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        for message in link.receive_waiting():  # a node that leaves says so, and closes at once
            self._handle(message)
        # A connection that is closed was silent before if the network is at fault, and not if the process has ended.
        closed = Loss.BROKEN if self._node.liveness.is_silent(time.monotonic()) else Loss.CRASHED
        raise NodeLost(link.lost.result(), link.loss or closed)

    async def _receive(self) -> None:
        while True:
            turn_ends = time.monotonic() + _TURN_S
            while time.monotonic() < turn_ends:
                self._handle(await self._node.link.receive())
            await asyncio.sleep(0)  # receive() does not suspend while messages are waiting

    async def _ping(self) -> None:
        for seq in itertools.count(1):
            verdict = self._node.liveness.tick(time.monotonic())
            if verdict is not None:
                raise LinkError(verdict)
            self._node.send(Ping(seq))
            await asyncio.sleep(self._timing.ping_s)

    def _handle(self, message: NodeToRouter) -> None:
        match message:
            case Tokens(entries):
                self._dispatcher.on_tokens(self._node, entries)
            case Failed():
                self._dispatcher.on_failed(self._node, message)
            case Pong():
                self._node.pong(message, time.monotonic())
                self._on_fleet(message)
            case Answered():
                self._node.answered(message)
            case CacheEvents():
                if not self._node.prefixes.apply(message):
                    self._node.send(CacheResync())
            case NotCached(key):
                self._dispatcher.on_not_cached(self._node, key)
            case Moved(key):
                self._dispatcher.on_moved(self._node, key)
            case RunsAlone(key):
                self._dispatcher.on_runs_alone(self._node, key)
            case MoveWanted(keys):
                self._dispatcher.on_move_wanted(self._node, keys)
            case Draining() | Relay():
                self._on_fleet(message)
            case NodeHello(node) if node.incarnation == self._node.ref.incarnation:
                pass  # a slow node answers the RouterHello of an earlier try too; it had both before any work
            case Leaving(reason, crashed):
                raise NodeLost(reason, Loss.CRASHED if crashed else Loss.LEFT)
            case _:
                raise LinkError(f"sent {type(message).__name__} in the middle of a connection")
