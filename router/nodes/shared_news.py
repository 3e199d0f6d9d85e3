"""News that routers send each other through the nodes that they share.

    an abort                    ──▶ every router ends its requests with that rid
    a node added by hand        ──▶ every router dials it, and keeps it
    a node removed by hand      ──▶ every router drains it and closes the connection

Routers do not know each other, and may be on different hosts. News goes through every connected node, so it may
arrive more than once; its sender's incarnation and its number identify it. While news holds, nodes send it to routers
that come later, and routers to nodes that come later.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

from router.nodes.membership import Membership
from router.nodes.node_link import LiveNode
from shared.log import event
from shared.protocol.messages import AddedNode, Relay, RemovedNode, RouterNews

_MAX_REMEMBERED = 4096


class SharedNews:
    """Sends this router's news, and takes those of other routers once each."""

    def __init__(self, membership: Membership, incarnation: str) -> None:
        self._membership = membership
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._taken: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._added: dict[str, AddedNode] = {}

    def send(self, news: RouterNews) -> None:
        """Send news to all other routers."""
        self._remember(news)
        relay = Relay(self._incarnation, next(self._numbers), news)
        for node in self._membership.all_live():
            node.send(relay)

    def take(self, relay: Relay) -> RouterNews | None:
        """The news that a node relays; None if it was taken before."""
        origin = relay.router, relay.number
        if relay.router == self._incarnation or origin in self._taken:
            return None
        self._taken[origin] = None
        if len(self._taken) > _MAX_REMEMBERED:
            self._taken.popitem(last=False)
        event("router_news", router=relay.router, news=type(relay.news).__name__)
        self._remember(relay.news)
        return relay.news

    def send_current(self, node: LiveNode) -> None:
        """Send the news that hold to a node that has come."""
        for added in self._added.values():
            node.send(Relay(self._incarnation, next(self._numbers), added))

    def _remember(self, news: RouterNews) -> None:
        match news:
            case AddedNode(_, address):
                self._added[address] = news
            case RemovedNode(address):
                self._added.pop(address, None)
