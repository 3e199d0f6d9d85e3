"""What routers tell each other through the nodes that they share.

    an abort                    ──▶ every router ends what it runs under that rid
    a node added by hand        ──▶ every router dials it, and keeps it
    a node removed by hand      ──▶ every router drains it and hangs up

Routers do not know each other, and may be on different hosts. News goes through every connected node, so it may come
more than once: it is known by the incarnation of the router it comes from, and its number. Nodes tell it to routers
that come later, as long as it holds; a router tells nodes that come later.
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
    """One router's news, and those of others; each of these is taken once."""

    def __init__(self, membership: Membership, incarnation: str) -> None:
        self._membership = membership
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._heard: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._added: dict[str, AddedNode] = {}

    def tell(self, news: RouterNews) -> None:
        """Tell all other routers."""
        self._remember(news)
        relay = Relay(self._incarnation, next(self._numbers), news)
        for node in self._membership.all_live():
            node.send(relay)

    def take(self, relay: Relay) -> RouterNews | None:
        """The news that a node passes on; None when it has come before."""
        origin = relay.router, relay.number
        if relay.router == self._incarnation or origin in self._heard:
            return None
        self._heard[origin] = None
        if len(self._heard) > _MAX_REMEMBERED:
            self._heard.popitem(last=False)
        event("router_news", router=relay.router, news=type(relay.news).__name__)
        self._remember(relay.news)
        return relay.news

    def brief(self, node: LiveNode) -> None:
        """Tell a node, which may have come after the news, what holds."""
        for added in self._added.values():
            node.send(Relay(self._incarnation, next(self._numbers), added))

    def _remember(self, news: RouterNews) -> None:
        match news:
            case AddedNode(_, address):
                self._added[address] = news
            case RemovedNode(address):
                self._added.pop(address, None)
