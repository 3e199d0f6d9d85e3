"""A node that fails one request after another gets no more for a while.

This is the circuit breaker of Nygard, "Release It!".
"""

from __future__ import annotations

from dataclasses import dataclass

from router.dispatch.running_req import Node
from shared.log import event
from shared.timeline import Clock

FAILURES_TO_OPEN = 3
OPEN_S = 10.0
_FORGET_S = 600.0
"""A node of which nothing has failed for so long has no breaker any more."""


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    failed_at: float = 0.0
    open_until: float = 0.0


class CircuitBreakers:
    """One breaker for each node id of which a request, or the connection, has failed.

    A breaker opens after FAILURES_TO_OPEN in a row. From then on the node gets one request each OPEN_S, until it has
    served one to the end. A node that is started anew keeps its breaker.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers: dict[str, _Breaker] = {}

    def failed(self, node: Node) -> None:
        """Count a failure that a node is to blame for, or the loss of its connection."""
        now = self._clock()
        self._breakers = {name: b for name, b in self._breakers.items() if now < b.failed_at + _FORGET_S}
        breaker = self._breakers.setdefault(node.ref.node_id, _Breaker())
        breaker.num_failures += 1
        breaker.failed_at = now
        if breaker.num_failures >= FAILURES_TO_OPEN and now >= breaker.open_until:
            breaker.open_until = now + OPEN_S
            event("circuit_open", node=node.ref.incarnation, failures=breaker.num_failures, for_s=OPEN_S)

    def sent(self, node: Node) -> None:
        """Let no other request follow one that is sent to a node whose breaker was open."""
        breaker = self._breakers.get(node.ref.node_id)
        if breaker is not None and breaker.num_failures >= FAILURES_TO_OPEN:
            breaker.open_until = self._clock() + OPEN_S

    def served(self, node: Node) -> None:
        """Close the breaker of a node that has served a request to the end."""
        self._breakers.pop(node.ref.node_id, None)

    def is_open(self, node: Node) -> bool:
        """True while a node should get no requests."""
        breaker = self._breakers.get(node.ref.node_id)
        return breaker is not None and self._clock() < breaker.open_until
