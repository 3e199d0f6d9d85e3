"""News that routers send each other through the nodes that they share.

    an abort                    ──▶ every router ends its requests with that rid
    a node added by hand        ──▶ every router dials it, and keeps it
    a node removed by hand      ──▶ every router drains it and closes the connection

Routers do not know each other, and may be on different hosts. News goes through every connected node, so it may
arrive more than once; its sender's incarnation and its number identify it. While news holds, nodes send it to routers
that come later, and routers to nodes that come later.

A router that does not know of a removal yet may send again that the node was added. So every change of the fleet has
a time, and each router remembers the latest change of each address: it drops an older one, and sends the removal
once more. It also passes every removal on, because the router that removed a node may not be connected to all others.
A time far ahead would hold for ever, and is not believed.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from router.nodes.live_node import LiveNode
from shared.log import LimitedWarning, event
from shared.protocol.messages import AbortedReqs, AddedNode, Relay, RemovedNode, RouterNews
from shared.timeline import Clock

MAX_REMEMBERED = 4096
MAX_ABORTS_A_SECOND = 250
"""Sent to other routers. What an operator does to the fleet is not bounded."""
_STEP_S = 0.001
MAX_AHEAD_S = 86400.0
"""How far the clock of another router may be ahead of this one's."""


class SharedNews:
    """Sends this router's news to `all_live` nodes, and takes those of other routers once each."""

    def __init__(
        self, all_live: Callable[[], Sequence[LiveNode]], incarnation: str, clock: Clock = time.time
    ) -> None:
        self._all_live = all_live
        self._incarnation = incarnation
        self._clock = clock
        self._numbers = itertools.count(1)
        self._taken: OrderedDict[Relay, None] = OrderedDict()
        """With the news itself: what another process says under a router's name and number takes no place."""
        self._not_believed = LimitedWarning("news_not_believed")
        self._changes: OrderedDict[str, tuple[int, AddedNode | RemovedNode]] = OrderedDict()
        """By address: the latest change, and the number under which this router sends it."""
        self._aborts = 0, 0
        """The latest second with an abort, and the number of aborts in it."""

    def next_time(self, address: str) -> float:
        """The time of a change that is asked for now: later than any known change of the address."""
        _, known = self._changes.get(address, (0, None))
        return max(self._clock(), known.at + _STEP_S if known is not None else 0.0)

    def send(self, change: AddedNode | RemovedNode) -> None:
        """Send a change of the fleet to all other routers."""
        self._to_all(self._remember(change), change)

    def send_abort(self, rid: str | None) -> bool:
        """Send an abort to all other routers. False if there were too many in this second."""
        second = int(self._clock())
        num_before = self._aborts[1] if self._aborts[0] == second else 0
        self._aborts = second, num_before + 1
        if num_before >= MAX_ABORTS_A_SECOND:
            return False
        self._to_all(next(self._numbers), AbortedReqs(rid))
        return True

    def take(self, relay: Relay) -> RouterNews | None:
        """The news that a node relays; None if it was taken before, or if a later change is known."""
        if relay.router == self._incarnation or relay in self._taken:
            return None
        self._taken[relay] = None
        if len(self._taken) > MAX_REMEMBERED:
            self._taken.popitem(last=False)
        news = relay.news
        if not isinstance(news, AbortedReqs):
            if not news.at <= self._clock() + MAX_AHEAD_S:
                self._not_believed(router=relay.router, address=news.address, at=news.at)
                return None
            number, known = self._changes.get(news.address, (0, None))
            if known is not None and _order(known) >= _order(news):
                if isinstance(known, RemovedNode) and isinstance(news, AddedNode):
                    self._to_all(number, known)
                return None
            number = self._remember(news)
            if isinstance(news, RemovedNode):
                self._to_all(number, news)
        about = {"rid": news.rid} if isinstance(news, AbortedReqs) else {"address": news.address}
        event("router_news", router=relay.router, news=type(news).__name__, **about)
        return news

    def send_current(self, node: LiveNode) -> None:
        """Send the news that hold to a node that has come."""
        for number, change in self._changes.values():
            if isinstance(change, AddedNode):
                node.send(Relay(self._incarnation, number, change))

    def forget_added(self, address: str, left_s: float) -> None:
        """Send no longer that this node was added: it says that it is being drained for its removal."""
        _, known = self._changes.get(address, (0, None))
        if isinstance(known, AddedNode):
            self._remember(RemovedNode(address, known.incarnation, left_s, known.at))

    def _remember(self, change: AddedNode | RemovedNode) -> int:
        number = next(self._numbers)
        self._changes[change.address] = number, change
        self._changes.move_to_end(change.address)
        if len(self._changes) > MAX_REMEMBERED:
            self._changes.popitem(last=False)
        return number

    def _to_all(self, number: int, news: RouterNews) -> None:
        relay = Relay(self._incarnation, number, news)
        for node in self._all_live():
            node.send(relay)


def _order(change: AddedNode | RemovedNode) -> tuple[float, bool]:
    """The greater one of two changes holds; of two at the same time, the removal."""
    return change.at, isinstance(change, RemovedNode)
