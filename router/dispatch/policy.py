"""Which of several nodes gets the next request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from shared.protocol.messages import NodeRef


class HasRef(Protocol):
    """Anything that stands for a node."""

    @property
    def ref(self) -> NodeRef:
        """Who the node is."""
        ...


N = TypeVar("N", bound=HasRef)


class RoutingPolicy(Protocol):
    """Chooses among nodes that could all serve the request."""

    def choose(self, nodes: Sequence[N]) -> N:
        """One of `nodes`, which is not empty."""
        ...


class RoundRobin:
    """Each in turn, by name: the node after the last one chosen, so that a fleet that changes stays balanced."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, nodes: Sequence[N]) -> N:
        """See RoutingPolicy."""
        in_turn = sorted(nodes, key=lambda node: node.ref.node_id)
        chosen = next((node for node in in_turn if node.ref.node_id > self._last), in_turn[0])
        self._last = chosen.ref.node_id
        return chosen
