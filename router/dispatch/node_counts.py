"""How many sequences each node has now: what its latest Pong said, and what this router has done since."""

from __future__ import annotations

from dataclasses import dataclass

from router.dispatch.running_req import Node
from shared.protocol.messages import Load


@dataclass(slots=True)
class _Count:
    """The sequences that this router has on one node, and how many more those are since `load` was heard."""

    load: Load
    num_live: int = 0
    num_since: int = 0


class NodeCounts:
    """The sequences of each node. The Dispatcher tells what it sends and what ends, so no burst goes unseen."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def sent(self, node: Node) -> None:
        """A sequence is on its way to `node`."""
        self._change(node, 1)

    def ended(self, node: Node) -> None:
        """A sequence has left `node`."""
        self._change(node, -1)

    def lost(self, node: Node) -> None:
        """`node` is gone, and all its sequences have ended."""
        self._counts.pop(node.ref.incarnation, None)

    def num_seqs(self, node: Node) -> int:
        """The sequences of all routers on `node`; those of others as of its latest Pong."""
        load = node.load
        told = load.num_running + load.num_waiting + load.num_transferring + load.num_bootstrapping
        own = self._counts.get(node.ref.incarnation)
        if own is None:
            return told
        # A Pong does not count sequences that were on their way when it was sent; this router knows of its own.
        return max(own.num_live, told + own.num_since if own.load is load else told)

    def _change(self, node: Node, by: int) -> None:
        load = node.load
        count = self._counts.get(node.ref.incarnation)
        if count is None:
            count = self._counts[node.ref.incarnation] = _Count(load)
        if count.load is not load:
            count.load, count.num_since = load, 0
        count.num_live += by
        count.num_since += by
