"""What KVSender and KVReceiver have in common: one lock, events for the scheduler, peers with links, deadlines."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from shared.kvtransfer.inbox import KeyedInbox
from shared.kvtransfer.links import Endpoint
from shared.kvtransfer.receiver_peers import ReceiverPeers
from shared.kvtransfer.sender_peers import SenderPeers
from shared.protocol.messages import LinkReport

TICK_S = 0.01
"""`tick` looks at deadlines no more often than this."""

Transfer = TypeVar("Transfer")
Event = TypeVar("Event")


class Side(ABC, Generic[Transfer, Event]):
    """The transfers of one direction at this node. The lock guards all state and is never held across a wait."""

    transfers: KeyedInbox[Any, Any, Any]
    peers: SenderPeers | ReceiverPeers

    def __init__(self, own: Endpoint) -> None:
        self._own = own
        self._outbox = own.outbox
        self._clock = own.clock
        self._options = own.options
        self._lock = threading.RLock()
        self._events: list[Event] = []
        self._next_tick = 0.0
        self._closed = False

    @property
    def link_reports(self) -> tuple[LinkReport, ...]:
        """Links that are ready for use."""
        return self.peers.links.reports

    @property
    def unreachable(self) -> dict[str, str]:
        """Connected peers to which pages cannot travel now, and why; a link that is being built is none of them."""
        return self.peers.unreachable

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
            return events

    def tick(self) -> None:
        """Enforce deadlines, watch peers, rebuild links. Cheap to call in every round of the loop."""
        now = self._clock()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        with self._lock:
            if self._closed:
                return
            for transfer in self.transfers:
                self._check_deadline(transfer, now)
            self.transfers.expire(now)
            self.peers.tick(now)

    @abstractmethod
    def _check_deadline(self, transfer: Transfer, now: float) -> None:
        """End the transfer if its time is over."""

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._own.wake()
