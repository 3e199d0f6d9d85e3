"""How many sequences each node has now: those of its latest Pong, and those that this router has sent since."""

from __future__ import annotations

from dataclasses import dataclass

from router.dispatch.running_req import Node
from shared.protocol.messages import Load


@dataclass(slots=True)
class _Count:
    """This router's sequences on one node (`num_live`), and the change of that number since `load` arrived."""

    load: Load
    num_live: int = 0
    num_since: int = 0


class NodeCounts:
    """Counts the sequences of each node. Sequences count when they are sent, so a burst is seen before a Pong."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def sent(self, node: Node) -> None:
        """Count a sequence that is sent to `node`."""
        self._change(node, 1)

    def ended(self, node: Node) -> None:
        """Count a sequence off that has left `node`."""
        self._change(node, -1)

    def lost(self, node: Node) -> None:
        """Forget `node`, whose sequences have all ended."""
        self._counts.pop(node.ref.incarnation, None)

    def num_seqs(self, node: Node) -> int:
        """The sequences of all routers on `node`; those of others as of its latest Pong."""
        load = node.load
        in_pong = load.num_running + load.num_waiting + load.num_transferring + load.num_bootstrapping
        own = self._counts.get(node.ref.incarnation)
        if own is None:
            return in_pong
        # A Pong does not count sequences that were on their way when it was sent. `num_live` counts this router's.
        return max(own.num_live, in_pong + own.num_since if own.load is load else in_pong)

    def _change(self, node: Node, by: int) -> None:
        load = node.load
        count = self._counts.get(node.ref.incarnation)
        if count is None:
            count = self._counts[node.ref.incarnation] = _Count(load)
        if count.load is not load:
            count.load, count.num_since = load, 0
        count.num_live += by
        count.num_since += by
