"""What a node knows for the routers that share it: whether it is drained, and what they have to tell each other.

A node that is drained to take another role waits until each of its routers has let it go.

Routers do not know each other; those that share a node hear of each other's aborts, and of nodes that an operator has
added or removed, by way of that node. A router that comes later is told what still holds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from shared import log
from shared.protocol.messages import (
    AddedNode,
    Draining,
    Outbox,
    Relay,
    RemovedNode,
    Role,
)
from shared.timeline import Clock

MAX_ADDED_NODES = 1024


class RouterRelay:
    """Used by the control thread, except `take_role`. `routers` returns those that the node has heard lately."""

    def __init__(self, outbox: Outbox, routers: Callable[[], Iterable[str]], clock: Clock) -> None:
        self._outbox = outbox
        self._routers = routers
        self._clock = clock
        self._drained_at: float | None = None
        """When the time of running requests is up; None: the node is not drained."""
        self._stops = False
        self._next_role: Role | None = None
        self._takes_role = False
        self._lock = threading.Lock()
        """So that a removal is told to routers, or comes after the node has taken its role."""
        self._let_go: set[str] = set()
        """The routers that have no work here any more, while the node is drained to take `_next_role`."""
        self._added: OrderedDict[str, Relay] = OrderedDict()
        self._refused = log.LimitedWarning("relay_refused", clock)

    @property
    def is_draining(self) -> bool:
        """Whether the node is to be emptied. Any thread may ask."""
        return self._drained_at is not None

    def greet(self, router: str, *, resume: bool) -> None:
        """Tell a router that has just come what holds. With `resume`, a node that was to be removed is kept."""
        if resume and self.is_leaving and not self._stops:
            self._drained_at = None
        self._let_go.discard(router)
        if self._drained_at is not None:
            left_s = max(0.0, self._drained_at - self._clock())
            self._outbox.send(router, Draining(left_s, self._stops, self._next_role))
        for relay in self._added.values():
            self._outbox.send(router, relay)

    @property
    def is_leaving(self) -> bool:
        """Whether the node is drained for its removal."""
        return self._drained_at is not None and self._next_role is None

    @property
    def next_role(self) -> Role | None:
        """The role that the node is to take now, since every router has let it go."""
        if self._next_role is None or not self._let_go.issuperset(self._routers()):
            return None
        return self._next_role

    def take_role(self) -> Role | None:
        """The `next_role`, which the node takes now: no removal counts any more."""
        if self._next_role is None:
            return None
        with self._lock:
            role = self.next_role
            self._takes_role = role is not None
            return role

    def drain(self, timeout_s: float, role: Role | None = None, *, stops: bool = False) -> None:
        """Tell every router to send nothing new, and that requests may run for `timeout_s`.

        A later call can shorten that. The node then takes `role`; None: the routers hang up. With `stops` this
        process is about to end. The scheduler thread calls it then, as the last change of all.
        """
        self._stops |= stops
        drained_at = self._clock() + timeout_s
        with self._lock:
            if self._takes_role and not stops:
                return
            is_same = role is self._next_role
            if not stops and self._drained_at is not None and is_same and drained_at >= self._drained_at:
                return
            if not is_same:
                self._let_go.clear()
            self._drained_at, self._next_role = drained_at, role
        log.event("draining", timeout_s=timeout_s, stops=stops, next_role=role)
        for router in self._routers():
            self._outbox.send(router, Draining(timeout_s, self._stops, role))

    def let_go(self, router: str) -> None:
        """Note that a router has no work here any more."""
        self._let_go.add(router)

    def relay(self, sender: str, message: Relay) -> None:
        """Pass a router's news on to all others."""
        if message.router != sender:
            self._refused(router=sender, news=type(message.news).__name__)
            return
        match message.news:
            case AddedNode(_, address):
                self._added[address] = message
                if len(self._added) > MAX_ADDED_NODES:
                    self._added.popitem(last=False)
            case RemovedNode(address):
                self._added.pop(address, None)
        for router in self._routers():
            if router != sender:
                self._outbox.send(router, message)
