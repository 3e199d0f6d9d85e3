"""A node at the other end of a link, from its hello to the end of the link."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.node import Loss, Node, believed
from router.nodes.node_link import NodeLink
from shared.errors import LinkError
from shared.log import LimitedWarning
from shared.protocol.heartbeat import Heartbeat
from shared.protocol.messages import (
    Answered,
    CacheResync,
    Draining,
    Leaving,
    Load,
    NodeHello,
    NodeToRouter,
    Ping,
    Pong,
    Relay,
    RouterToNode,
)

_TURN_S = 0.005
"""After so long with one node's messages the event loop serves other nodes and the streams."""

OnFleet = Callable[[Pong | Draining | Relay], None]


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


class Liveness:
    """Watches the pongs of one node.

    A node is dead when it is silent for `timeout_s`, or when the progress counter in its pongs has stood still for
    that long. An idle loop counts its turns there, and a long prefill chunk its layers.
    """

    def __init__(self, now: float, *, timeout_s: float, interval_s: float) -> None:
        self._heartbeat = Heartbeat(interval_s, timeout_s, now)
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._progress = -1
        self._stuck = False
        """True if the latest pong since the last ping told no progress."""
        self._num_stuck = 0
        """Pings in a row that such a pong followed. Time does not count, since this process may have been stopped.
        Pongs do not count, since a scrape of /metrics asks for one, and a node sends one when a link comes or goes.
        """

    def pong(self, now: float, load: Load) -> None:
        """Take the load of a Pong, whether it was asked for or not."""
        self._heartbeat.heard(now)
        self._stuck = load.progress == self._progress
        self._progress = load.progress
        if not self._stuck:
            self._num_stuck = 0

    def is_silent(self, now: float) -> bool:
        """Whether half of `timeout_s` has passed without a pong."""
        return self._heartbeat.silence(now) >= self._timeout_s / 2

    def tick(self, now: float) -> str | None:
        """Called with every ping. Returns why the node is dead, or None."""
        if self._heartbeat.silent(now):
            return f"no answer for {self._heartbeat.silence(now):.1f} s"
        self._heartbeat.pinged(now)
        self._num_stuck += self._stuck
        self._stuck = False
        if self._num_stuck * self._interval_s >= self._timeout_s:
            return f"no progress for {self._num_stuck * self._interval_s:.1f} s"
        return None


class LiveNode(Node):
    """A node at the other end of a NodeLink. The dispatcher sends requests to it."""

    def __init__(self, hello: NodeHello, link: NodeLink, timing: Timing) -> None:
        super().__init__(hello)
        self.link = link
        self._ping_s = timing.ping_s
        self.liveness = Liveness(time.monotonic(), timeout_s=timing.node_timeout_s, interval_s=timing.ping_s)
        self.load_at = 0.0
        self._wrong_load = LimitedWarning("wrong_load")
        self._pong = asyncio.Event()
        self._last_refresh = self._last_refreshed = 0
        """Their pings count down from -1. Other pings count up from 1, and a pong without a ping has 0."""
        self._calls = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answered]] = {}

    def send(self, message: RouterToNode) -> None:
        """Queue a message for the node, whose version knows its type. Dropped when the link is lost."""
        assert message.since_version <= self.version, f"{type(message).__name__} to version {self.version}"
        self.link.send(message)

    def call(self, message: Callable[[int], RouterToNode]) -> asyncio.Future[Answered]:
        """Send a call, and return the answer to come. A node that is lost before has refused, with the call id 0."""
        call_id, answer = next(self._calls), asyncio.get_running_loop().create_future()
        self._asked[call_id] = answer
        answer.add_done_callback(lambda _: self._asked.pop(call_id))
        self.send(message(call_id))
        return answer

    def answered(self, answered: Answered) -> None:
        """Take the answer to a call."""
        answer = self._asked.get(answered.call_id)
        if answer is not None and not answer.done():
            answer.set_result(answered)

    def lost(self) -> None:
        """End the calls that wait for an answer."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(Answered(0, False, "it was lost before it answered"))

    def pong(self, pong: Pong, now: float) -> None:
        """Take the load of a Pong, which answers a Ping or reports a change of links."""
        self._load, wrong = believed(pong.load)
        self.load_at = now
        if wrong:
            figures = ", ".join(f"{name}={figure:g}" for name, figure in wrong.items())
            self._wrong_load(node=self.ref.node_id, figures=figures, taken_as=0)
        self.liveness.pong(now, self.load)
        if not self.prefixes.compare(pong.cache_seq):
            self.send(CacheResync())
        self._last_refreshed = min(self._last_refreshed, pong.seq)
        self._pong.set()

    async def refresh(self) -> None:
        """Wait until `load` is newer than this call: a pong that was under way before may come first."""
        self._last_refresh -= 1
        asked = self._last_refresh
        self.send(Ping(asked))
        while self._last_refreshed > asked:
            self._pong.clear()
            await self._pong.wait()

    async def run(self, dispatcher: Dispatcher, on_fleet: OnFleet) -> None:
        """Receive and ping until the link is lost, or the node is silent or leaves: always raises a LinkError.

        What the node says of requests goes to the `dispatcher`, and what it says of the fleet to `on_fleet`.
        """
        link, handle = self.link, partial(self._handle, dispatcher, on_fleet)
        parts = [asyncio.create_task(self._receive(handle)), asyncio.create_task(self._ping())]
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
            handle(message)
        # A connection that is closed was silent before if the network is at fault, and not if the process has ended.
        closed = Loss.BROKEN if self.liveness.is_silent(time.monotonic()) else Loss.CRASHED
        raise NodeLost(link.lost.result(), link.loss or closed)

    async def _receive(self, handle: Callable[[NodeToRouter], None]) -> None:
        while True:
            turn_ends = time.monotonic() + _TURN_S
            while time.monotonic() < turn_ends:
                handle(await self.link.receive())
            await asyncio.sleep(0)  # receive() does not suspend while messages are waiting

    async def _ping(self) -> None:
        for seq in itertools.count(1):
            verdict = self.liveness.tick(time.monotonic())
            if verdict is not None:
                raise LinkError(verdict)
            self.send(Ping(seq))
            await asyncio.sleep(self._ping_s)

    def _handle(self, dispatcher: Dispatcher, on_fleet: OnFleet, message: NodeToRouter) -> None:
        match message:
            case Pong():
                self.pong(message, time.monotonic())
                on_fleet(message)
            case Answered():
                self.answered(message)
            case Draining() | Relay():
                on_fleet(message)
            case NodeHello(node) if node.incarnation == self.ref.incarnation:
                pass  # a slow node answers the RouterHello of an earlier try too; it had both before any work
            case Leaving(reason, crashed):
                raise NodeLost(reason, Loss.CRASHED if crashed else Loss.LEFT)
            case _ if not dispatcher.hear(self, message):
                raise LinkError(f"sent {type(message).__name__} in the middle of a connection")
