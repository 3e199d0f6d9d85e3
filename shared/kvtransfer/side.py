"""What KVSender and KVReceiver have in common: one lock, events for the scheduler, peers and the links to them.

A message names a transfer that is open, that is not open yet, or that has ended: `KeyedInbox` knows which.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shared import log
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.states import ReceiveTransfer, SendTransfer
from shared.protocol.heartbeat import Heartbeat
from shared.protocol.messages import LinkReport, ReqKey, Struct
from shared.protocol.transfer_messages import (
    CancelTransfer,
    Done,
    Handoff,
    LinkLost,
    Offer,
    PeerPing,
    PeerPong,
    Ready,
    StoreSet,
)

TICK_S = 0.01
"""`tick` looks at deadlines no more often than this."""


PeerMessage = StoreSet | LinkLost | PeerPing | PeerPong
"""Messages about a peer or its link, of the kinds that both ends send."""
Link = TypeVar("Link", bound=LinkWorker)
Transfer = TypeVar("Transfer", bound=SendTransfer | ReceiveTransfer)
Event = TypeVar("Event")
Answer = TypeVar("Answer")
Message = TypeVar("Message", bound=Ready | Done | Offer | Handoff | CancelTransfer)
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class Peer(Generic[Link]):
    """A node at the other end: its control connection is up, and it may fall silent or refuse this node."""

    peer_id: str
    heartbeat: Heartbeat
    link: Link | None = None
    """The link that is being built or lives, if there is one."""
    link_death: str | None = None
    """Why the last link died."""
    refused: str | None = None
    """Why the two nodes can exchange no pages."""
    silent: bool = False

    @property
    def unreachable(self) -> str | None:
        """Why pages cannot travel now. None while its first link is being built."""
        if self.refused is not None:
            return self.refused
        return None if self.link is not None and self.link.live else self.link_death


AnyPeer = TypeVar("AnyPeer", bound=Peer[Any])


class Side(ABC, Generic[Transfer, Event, AnyPeer]):
    """The transfers of one direction at this node. The lock guards all state and is never held across a wait."""

    called: str
    """What this node is called in what the peer is told."""
    transfers: KeyedInbox[Transfer, Any, Any]

    def __init__(self, own: Endpoint) -> None:
        self._own = own
        self._outbox = own.outbox
        self._clock = own.clock
        self._options = own.options
        self._lock = threading.RLock()
        self._events: list[Event] = []
        self._peers: dict[str, AnyPeer] = {}
        self._links: list[LinkWorker] = []
        """Those of peers, and dead ones that are not finished."""
        self._ping_seq = 0
        self._next_tick = 0.0
        self._closed = False

    # ------------------------------------------------------------------------------ scheduler thread
    @property
    def link_reports(self) -> tuple[LinkReport, ...]:
        """Links that are ready for use."""
        with self._lock:
            return tuple(link.report for link in self._links if link.live)

    @property
    def unreachable(self) -> dict[str, str]:
        """Connected peers to which pages cannot travel now, and why; a link that is being built is none of them."""
        with self._lock:
            reasons = {peer.peer_id: peer.unreachable for peer in self._peers.values()}
        return {peer_id: reason for peer_id, reason in reasons.items() if reason is not None}

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
            for peer in list(self._peers.values()):
                self._watch(peer, now)

    def cancel(self, key: ReqKey, reason: str) -> None:
        """Give the transfer up; its terminal event follows when its pages are not touched any more.

        No-op once ended.
        """
        with self._lock:
            transfer = self._living(key)
            if transfer is not None:
                self._give_up(transfer, reason)

    def close(self) -> None:
        """Fail every transfer, end every link; returns when all threads are gone. `poll` still works."""
        with self._lock:
            self._closed = True
            peer_ids = list(self._peers)
            for peer_id in peer_ids:
                self._forget(peer_id, f"the {self.called} is shutting down", tell_peer=True)
            for transfer in self.transfers:
                self._give_up(transfer, "this node is shutting down")
            self._leave(peer_ids)
            links = [link for link in self._links if not link.finished]
        # Not under the lock: the links need it to report.
        for link in links:
            link.abort_ops()
        for link in links:
            link.join(self._options.build_timeout_s + self._options.op_timeout_s)

    # ------------------------------------------------------------------------------------ any thread
    def end_link_of(self, peer_id: str, reason: str, *, tell_peer: bool = True) -> None:
        """End the link with this peer, if there is one."""
        with self._lock:
            peer = self._peers.get(peer_id)
            if peer is not None and peer.link is not None:
                self.end_link(peer.link, reason, tell_peer=tell_peer)

    def end_link(self, link: LinkWorker, reason: str, *, tell_peer: bool = True) -> None:
        """End a link. Links die here and nowhere else."""
        with self._lock:
            if link.death is not None:
                return
            link.stop(reason)
            log.event("link_lost", link=link.name, reason=reason)
            if (peer := self._peers.get(link.peer_id)) is not None:
                peer.link, peer.link_death = None, reason
            if tell_peer:
                self._outbox.send(link.peer_id, LinkLost(link.name, reason))
            self._link_died(link, peer, reason)

    # ------------------------------------------------------------------- what the two sides do differently
    @abstractmethod
    def _check_deadline(self, transfer: Transfer, now: float) -> None:
        """End the transfer if its time is over."""

    @abstractmethod
    def _give_up(self, transfer: Transfer, reason: str) -> None:
        """End the transfer, and tell the peer that this node does not want it any more."""

    @abstractmethod
    def _tombstone(self, end: Any) -> Any:
        """What is answered to late messages about a transfer that has ended with this event."""

    @abstractmethod
    def _check_peer(self, peer: AnyPeer, silence: str | None, now: float) -> None:
        """See to the link of a peer; `silence`: the peer is silent, and why its transfers fail."""

    @abstractmethod
    def _link_died(self, link: LinkWorker, peer: AnyPeer | None, reason: str) -> None:
        """A link is dead, and what used it fails. `peer` is None if it is gone itself."""

    def _leave(self, peer_ids: Sequence[str]) -> None:
        """Say goodbye to the peers, as this node ends."""

    # --------------------------------------------------------------------------------- under the lock
    def _living(self, key: ReqKey) -> Transfer | None:
        """The transfer, or None when it has ended. A key that was never opened is the caller's mistake."""
        transfer = self.transfers.get(key)
        if transfer is None:
            assert self.transfers.ended(key) is not None or self._closed, f"{key} was never opened"
            return None
        return None if transfer.ended else transfer

    def _settle(self, transfer: Transfer) -> None:
        """Post the terminal event as soon as nothing reads or writes the pages."""
        end: Any = transfer.take_end()
        if end is not None:
            self.transfers.close(transfer.key, self._tombstone(end), self._clock())
            self._post(end)

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._own.wake()

    def _meet(self, peer: AnyPeer) -> None:
        """Enter a peer that is heard now; it takes the place of one of the same id, whose link has ended."""
        if (former := self._peers.get(peer.peer_id)) is not None:
            peer.link_death = former.link_death
        self._peers[peer.peer_id] = peer

    def _forget(self, peer_id: str, reason: str, *, tell_peer: bool) -> bool:
        """Forget a peer that is gone, and end the link with it. False if there was none."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None and peer.link is not None:
            self.end_link(peer.link, reason, tell_peer=tell_peer)
        return peer is not None

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._options.ping_s, self._options.peer_timeout_s, self._clock())

    def _heard(self, peer_id: str, now: float) -> AnyPeer | None:
        """The peer, of which a message has come; None when this node has not met it."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.heartbeat.heard(now)
            peer.silent = False
        return peer

    def _take(self, peer: AnyPeer, message: PeerMessage) -> None:
        """Handle a message about the peer, or about its link if that is the one that the message names."""
        link: LinkWorker | None = peer.link
        match message:
            case PeerPing():
                self._outbox.send(peer.peer_id, PeerPong(message.seq))
            case StoreSet() if link is not None and link.name == message.link:
                if not link.store.feed(message.name, message.value):
                    self.end_link(link, "the peer filled the link's store")
            case LinkLost() if link is not None and link.name == message.link:
                self.end_link(link, f"given up by the peer: {message.reason}", tell_peer=False)

    def _watch(self, peer: AnyPeer, now: float) -> None:
        """Ping a peer that is due, and end the link of one that is silent."""
        silence = None
        if peer.heartbeat.silent(now):
            if not peer.silent:
                log.warn("peer_silent", peer=peer.peer_id)
            peer.silent = True
            silence = f"silent for {self._options.peer_timeout_s:g} s"
            self.end_link_of(peer.peer_id, silence)
        if peer.heartbeat.ping_due(now):
            self._ping_seq += 1
            self._outbox.send(peer.peer_id, PeerPing(self._ping_seq))
        self._check_peer(peer, silence, now)

    def _begin(self, peer: AnyPeer, link: LinkWorker) -> None:
        """Build a link with a peer that has none."""
        assert peer.link is None, "end the old link first"
        peer.link = link
        self._links = [*(one for one in self._links if not one.finished), link]
        link.start()


# ------------------------------------------------------------------------------ messages that name a transfer
class Remembered(Generic[Key, Value]):
    """Values that are forgotten after `ttl_s`, and of which there are `max_keys` at most."""

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        """Each with when it expires. All live equally long, so the oldest come first."""

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._values))

    def get(self, key: Key) -> Value | None:
        """The value of `key`, while it is remembered."""
        remembered = self._values.get(key)
        return None if remembered is None else remembered[1]

    def add(self, key: Key, value: Value, now: float) -> Key | None:
        """Remember `value`. Returns the key that had to leave for it, if any."""
        self._values[key] = (now + self._ttl_s, value)
        return self._values.popitem(last=False)[0] if len(self._values) > self._max_keys else None

    def pop(self, key: Key) -> Value | None:
        """Forget `key`, and return its value."""
        return self._values.pop(key, (0.0, None))[1]

    def expire(self, now: float) -> list[Key]:
        """Forget what is too old. Returns its keys."""
        expired = []
        while self._values and next(iter(self._values.values()))[0] <= now:
            expired.append(self._values.popitem(last=False)[0])
        return expired


class KeyedInbox(Generic[Transfer, Message, Answer]):
    """The open transfers of one side, and the messages that name a transfer. Used under the lock of the side.

    A message of an open transfer goes to `apply`, if its peer is the transfer's. One whose key is not open yet is
    parked until it is, or answered with a cancel. One whose key has ended is answered with what `answer_late` makes
    of it and of the key's tombstone. Each key is opened once, and closed once.
    """

    MAX_PARKED_PER_KEY = 1024

    def __init__(
        self,
        *,
        own: Endpoint,
        apply: Callable[[Transfer, Message], None],
        answer_late: Callable[[Message, Answer], Struct | None],
        called: str,
    ) -> None:
        options = own.options
        self._outbox = own.outbox
        self._apply = apply
        self._answer_late = answer_late
        self._called = called
        """What this node is called in what the peer is told."""
        self._open: dict[ReqKey, Transfer] = {}
        self._tombstones: Remembered[ReqKey, Answer] = Remembered(options.tombstone_s, options.max_tombstones)
        """Keys that have ended, so that a late message cannot reopen one; each with the answer to such a message."""
        self._parked: Remembered[tuple[ReqKey, str], list[Message]] = Remembered(
            options.park_s, options.max_parked
        )
        """By key and peer, messages whose key is not open here yet, in order of arrival."""

    def __iter__(self) -> Iterator[Transfer]:
        """The open transfers, of which any may be closed meanwhile."""
        return iter(list(self._open.values()))

    def open(self, transfer: Transfer) -> None:
        """Give later messages with its key to `transfer`; `take_parked` applies those that came before."""
        key = transfer.key
        assert key not in self._open and self.ended(key) is None, f"{key} opened twice"
        self._open[key] = transfer

    def take_parked(self, transfer: Transfer) -> None:
        """Apply what came for `transfer` before it was opened."""
        for message in self._parked.pop((transfer.key, transfer.peer_id)) or ():
            self._apply(transfer, message)

    def get(self, key: ReqKey) -> Transfer | None:
        """The open transfer of `key`."""
        return self._open.get(key)

    def ended(self, key: ReqKey) -> Answer | None:
        """The tombstone of `key`."""
        return self._tombstones.get(key)

    def of_peer(self, peer_id: str) -> list[Transfer]:
        """The open transfers with this peer."""
        return [transfer for transfer in self._open.values() if transfer.peer_id == peer_id]

    def close(self, key: ReqKey, answer: Answer, now: float) -> None:
        """End a transfer; `answer` is kept for late messages."""
        del self._open[key]
        self._tombstones.add(key, answer, now)

    def receive(self, peer_id: str, message: Message, now: float) -> None:
        """Handle a message of `peer_id`."""
        transfer = self._open.get(message.key)
        if transfer is not None:
            if transfer.peer_id == peer_id:
                self._apply(transfer, message)
            return
        tombstone, place = self.ended(message.key), (message.key, peer_id)
        if tombstone is not None:
            answer = self._answer_late(message, tombstone)
            if answer is not None:
                self._outbox.send(peer_id, answer)
        elif (parked := self._parked.get(place)) is not None:
            if len(parked) < self.MAX_PARKED_PER_KEY:
                parked.append(message)
        elif (evicted := self._parked.add(place, [message], now)) is not None:
            self._cancel(*evicted, f"too many transfers wait for their request at the {self._called}")

    def drop_peer(self, peer_id: str) -> None:
        """Drop what a peer announced that is gone."""
        for place in self._parked:
            if place[1] == peer_id:
                self._parked.pop(place)

    def expire(self, now: float) -> None:
        """Cancel what was parked for too long, and forget old tombstones."""
        for place in self._parked.expire(now):
            self._cancel(*place, f"the request never came to the {self._called}")
        self._tombstones.expire(now)

    def _cancel(self, key: ReqKey, peer_id: str, reason: str) -> None:
        self._outbox.send(peer_id, CancelTransfer(key, reason))
