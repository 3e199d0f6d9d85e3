"""A node that fails one request after another gets no more for a while.

This is the circuit breaker of Nygard, "Release It!".
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from router.dispatch.running_req import Node
from shared.log import event
from shared.timeline import Clock

FAILURES_TO_OPEN = 3
OPEN_S = 10.0


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    open_until: float = 0.0


class CircuitBreakers:
    """One breaker for each node that has failed a request. It opens after FAILURES_TO_OPEN in a row, for OPEN_S.

    Then the node is tried again: the next failure opens its breaker anew, and a request that it serves closes it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers: WeakKeyDictionary[Node, _Breaker] = WeakKeyDictionary()

    def failed(self, node: Node) -> None:
        """Count a failure that a node is to blame for."""
        breaker = self._breakers.setdefault(node, _Breaker())
        breaker.num_failures += 1
        if breaker.num_failures >= FAILURES_TO_OPEN and self._clock() >= breaker.open_until:
            breaker.open_until = self._clock() + OPEN_S
            event("circuit_open", node=node.ref.node_id, failures=breaker.num_failures, for_s=OPEN_S)

    def served(self, node: Node) -> None:
        """Close the breaker of a node that serves requests."""
        self._breakers.pop(node, None)

    def is_open(self, node: Node) -> bool:
        """True while a node should get no requests."""
        breaker = self._breakers.get(node)
        return breaker is not None and self._clock() < breaker.open_until
