"""News that routers send each other through the nodes that they share.

    an abort                    ──▶ every router ends its requests with that rid
    a node added by hand        ──▶ every router dials it, and keeps it
    a node removed by hand      ──▶ every router drains it and closes the connection

Routers do not know each other, and may be on different hosts. News goes through every connected node, so it may
arrive more than once; its sender's incarnation and its number identify it. Nodes tell routers that come later which
nodes were added.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

from router.nodes.live_node import LiveNode
from shared.log import event
from shared.protocol.messages import AbortedReqs, Relay, RouterNews

MAX_REMEMBERED = 4096


class SharedNews:
    """Sends this router's news to `all_live` nodes, and takes those of other routers once each."""

    def __init__(self, all_live: Callable[[], Sequence[LiveNode]], incarnation: str) -> None:
        self._all_live = all_live
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._taken: OrderedDict[Relay, None] = OrderedDict()
        """With the news itself: what another process says under a router's name and number takes no place."""

    def send(self, news: RouterNews) -> None:
        """Send news to all other routers."""
        relay = Relay(self._incarnation, next(self._numbers), news)
        for node in self._all_live():
            node.send(relay)

    def take(self, relay: Relay) -> RouterNews | None:
        """The news that a node relays; None if it was taken before."""
        if relay.router == self._incarnation or relay in self._taken:
            return None
        self._taken[relay] = None
        if len(self._taken) > MAX_REMEMBERED:
            self._taken.popitem(last=False)
        news = relay.news
        about = {"rid": news.rid} if isinstance(news, AbortedReqs) else {"address": news.address}
        event("router_news", router=relay.router, news=type(news).__name__, **about)
        return news
