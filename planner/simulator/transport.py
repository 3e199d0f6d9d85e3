"""KV transfer without bytes: the real state machines of both ends over links with bandwidth, latency and faults.

Replaces `KVSender` and `KVReceiver` (links, staging slots, grants, leases: tested over `FakeNetwork`) towards
the two schedulers. `shared.kvtransfer.states` decides what a transfer is, when it is complete and how it ends.
A node's network card sends, and receives, one range of pages at a time, first come first served.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.simulator.events import EventLoop, NodeClock
from shared.errors import TransferError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.states import (
    ReadyOverdue,
    Received,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveTransfer,
    SendEnded,
    SendEvent,
    SendState,
    SendTransfer,
)
from shared.protocol.messages import LinkReport, ReqKey
from shared.protocol.transfer_messages import CancelTransfer, Done, Handoff, Offer, Ready

Message = Ready | Offer | Handoff | Done | CancelTransfer


@dataclass(frozen=True, kw_only=True)
class NetworkModel:
    """Links between nodes. Pairs are (least, most) seconds, drawn anew each time."""

    bandwidth_bytes_s: float = 1.25e9
    """Of one node's card, in each direction: 10 Gbit/s."""
    latency_s: tuple[float, float] = (0.0002, 0.0002)
    """Of a message."""
    pages_latency_s: float | None = None
    """Of pages, on top of their length. None: that of a message."""
    notice_s: tuple[float, float] = (0.005, 0.05)
    """Until the others notice that a node has died."""
    transfer_fault: float = 0.0
    """Of a transfer breaking off, at each of its messages and each range of its pages."""


class Transport:
    """The wires between all nodes and routers. Messages of one party to another keep their order."""

    def __init__(self, loop: EventLoop, model: NetworkModel, page_nbytes: int, seed: int) -> None:
        self.loop = loop
        self.model = model
        self.random = random.Random(seed)
        self.nbytes = 0
        self._page_nbytes = page_nbytes
        self._senders: dict[str, SimSender] = {}
        self._receivers: dict[str, SimReceiver] = {}
        self._last_arrival: dict[tuple[str, str], float] = defaultdict(float)
        self._egress_free: dict[str, float] = defaultdict(float)
        self._ingress_free: dict[str, float] = defaultdict(float)
        self._egress_busy_s: dict[str, float] = defaultdict(float)
        self._ingress_busy_s: dict[str, float] = defaultdict(float)

    def join(self, name: str, sender: SimSender, receiver: SimReceiver) -> None:
        """A node is there."""
        self._senders[name] = sender
        self._receivers[name] = receiver

    def kill(self, name: str) -> None:
        """A node is gone with all it held; the others notice one by one."""
        del self._senders[name], self._receivers[name]
        for other in self._senders:
            notice = self.loop.now + self.draw(self.model.notice_s)
            self.loop.at(notice, self._senders[other].on_disconnected, name)
            self.loop.at(notice, self._receivers[other].on_disconnected, name)

    def lives(self, name: str) -> bool:
        """False once it was killed."""
        return name in self._senders

    def deliver(self, at: float, sender: str, to: str, run: Callable[..., None], *args: object) -> None:
        """Call `run` when a message sent at `at` arrives, in order with the others of this pair."""
        arrival = at + self.draw(self.model.latency_s)
        if self.model.latency_s[0] != self.model.latency_s[1]:
            pair = (sender, to)
            arrival = self._last_arrival[pair] = max(arrival, self._last_arrival[pair])
        self.loop.at(arrival, run, *args)

    def send(self, at: float, origin: _Side, to: str, message: Message) -> None:
        """A control message between two nodes, from one side of a transfer to the other."""
        self.deliver(at, origin.name, to, self._hand_over, origin, to, message)

    def send_pages(self, at: float, sender: str, to: str, offer: Offer) -> None:
        """The pages of an offer; both cards are taken when their turn has come."""
        self.loop.at(at, self._start_pages, sender, to, offer)

    @property
    def most_busy_s(self) -> float:
        """How long the busiest card has sent, or received."""
        return max((*self._egress_busy_s.values(), *self._ingress_busy_s.values()), default=0.0)

    def breaks(self) -> bool:
        """Whether a transfer breaks off here."""
        return self.model.transfer_fault > 0 and self.random.random() < self.model.transfer_fault

    def draw(self, bounds: tuple[float, float]) -> float:
        """A duration."""
        return bounds[0] if bounds[0] == bounds[1] else self.random.uniform(*bounds)

    def _start_pages(self, sender: str, to: str, offer: Offer) -> None:
        nbytes = offer.num_pages * self._page_nbytes
        start = max(self.loop.now, self._egress_free[sender], self._ingress_free[to])
        end = start + nbytes / self.model.bandwidth_bytes_s
        self._egress_free[sender] = self._ingress_free[to] = end
        self._egress_busy_s[sender] += end - start
        self._ingress_busy_s[to] += end - start
        self.loop.at(end, self._sent, sender, offer, nbytes)
        latency_s = self.model.pages_latency_s
        if latency_s is None:
            latency_s = self.draw(self.model.latency_s)
        self.loop.at(end + latency_s, self._arrive, sender, to, offer, nbytes)

    def _sent(self, sender: str, offer: Offer, nbytes: int) -> None:
        if sender in self._senders:
            self._senders[sender].on_sent(offer, nbytes)

    def _arrive(self, sender: str, to: str, offer: Offer, nbytes: int) -> None:
        receiver = self._receivers.get(to)
        if receiver is not None and sender in self._senders:
            self.nbytes += nbytes
            receiver.on_pages(sender, offer, nbytes)

    def _hand_over(self, origin: _Side, to: str, message: Message) -> None:
        side = self._receivers.get(to) if isinstance(origin, SimSender) else self._senders.get(to)
        if side is not None:
            side.on_message(origin.name, message)


class _Side:
    """What both ends share: their name, their clock, messages that came too early, and events for the scheduler."""

    def __init__(self, name: str, transport: Transport, clock: NodeClock, wake: Callable[[], None]) -> None:
        self.name = name
        self._transport = transport
        self._clock = clock
        self._wake = wake
        self._early: dict[ReqKey, list[Message]] = {}
        self._over: dict[ReqKey, str] = {}
        self.links: dict[str, LinkReport] = {}
        self.unreachable: dict[str, str] = {}

    @property
    def link_reports(self) -> tuple[LinkReport, ...]:
        return tuple(self.links.values())

    def tick(self) -> None:
        """Deadlines are not modelled: what is lost here is always noticed."""

    def close(self) -> None:
        """Nothing to let go of."""

    def on_message(self, peer: str, message: Message) -> None:
        raise NotImplementedError

    def on_disconnected(self, peer: str) -> None:
        raise NotImplementedError

    def _send(self, peer: str, message: Message) -> None:
        self._transport.send(self._clock(), self, peer, message)

    def _is_early(self, peer: str, message: Message) -> bool:
        """Keep a message of a key that is not open yet; answer one of a key that has ended."""
        if message.key not in self._over:
            self._early.setdefault(message.key, []).append(message)
        elif isinstance(message, Ready | Offer):
            self._send(peer, CancelTransfer(message.key, self._over[message.key]))
        return True

    def _check_alive(self, peer: str) -> None:
        transport = self._transport
        if not transport.lives(peer):
            at = self._clock() + transport.draw(transport.model.notice_s)
            transport.loop.at(at, self.on_disconnected, peer)


class SimSender(_Side):
    """A KVSender towards its scheduler."""

    def __init__(self, name: str, transport: Transport, clock: NodeClock, wake: Callable[[], None]) -> None:
        super().__init__(name, transport, clock, wake)
        self._transfers: dict[ReqKey, SendTransfer] = {}
        self._events: list[SendEvent] = []

    @property
    def num_transfers(self) -> int:
        """Opened keys without a terminal event."""
        return len(self._transfers)

    def open(self, key: ReqKey, peer_id: str) -> None:
        """As KVSender does."""
        assert key not in self._transfers and key not in self._over, f"{key} opened twice"
        self._transfers[key] = SendTransfer(key, peer_id, 1, self._clock(), None)
        self._check_alive(peer_id)
        for message in self._early.pop(key, ()):
            self.on_message(peer_id, message)

    def offer(self, key: ReqKey, page_ids: Sequence[int]) -> None:
        """As KVSender does."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.state is SendState.ENDED or not page_ids:
            return
        offer = Offer(key, transfer.offer(list(page_ids), self._clock()), len(page_ids))
        if self._breaks(transfer):
            return
        self._send(transfer.peer_id, offer)
        self._transport.send_pages(self._clock(), self.name, transfer.peer_id, offer)

    def handoff(self, key: ReqKey, handoff: Handoff) -> None:
        """As KVSender does."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.state is SendState.ENDED or self._breaks(transfer):
            return
        transfer.handoff(handoff.total_pages, self._clock())
        self._send(transfer.peer_id, handoff)

    def cancel(self, key: ReqKey, reason: str) -> None:
        """As KVSender does."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._end(transfer, ok=False, reason=reason, tell=CancelTransfer(key, reason))

    def tick(self) -> None:
        """Of all deadlines only that of Ready is modelled, since what a node computes depends on it."""
        now = self._clock()
        self._events += [ReadyOverdue(t.key) for t in self._transfers.values() if t.becomes_overdue(now)]

    def poll(self) -> list[SendEvent]:
        """Only now may the scheduler let go of what has ended."""
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, SendEnded):
                del self._transfers[event.key]
                self._over[event.key] = event.reason
        return events

    def on_message(self, peer: str, message: Message) -> None:
        """A receiver has said something."""
        transfer = self._transfers.get(message.key)
        if transfer is None:
            self._is_early(peer, message)
            return
        match message:
            case Ready():
                if transfer.ready(message.prefix_pages) and not self._breaks(transfer):
                    self._post(message)
            case Done(ok=ok, reason=reason):
                self._end(transfer, ok=ok, reason=reason)
            case CancelTransfer(reason=reason):
                self._end(transfer, ok=False, reason=f"cancelled by the decode node: {reason}")

    def num_pages_sent(self, key: ReqKey) -> tuple[int, int]:
        """As KVSender does."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.state is SendState.ENDED:
            return 0, 1
        return transfer.num_pages_sent, len(transfer.page_ids)

    def on_sent(self, offer: Offer, nbytes: int) -> None:
        """The pages of an offer have left, if its transfer has not ended."""
        transfer = self._transfers.get(offer.key)
        chunk = Chunk(offer.first_page, offer.num_pages, 0, 1)
        if transfer is not None and transfer.begin_gather(chunk) is not None:
            transfer.end_gather(chunk, nbytes, self._clock())

    def break_off(self, key: ReqKey) -> None:
        """A fault: the link of this transfer breaks now."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            reason = "the link broke (prefill node)"
            self._end(transfer, ok=False, reason=reason, tell=CancelTransfer(key, reason))

    def on_disconnected(self, peer: str) -> None:
        """A receiver is gone."""
        self.links.pop(peer, None)
        for transfer in list(self._transfers.values()):
            if transfer.peer_id == peer:
                self._end(transfer, ok=False, reason="the decode node is gone")

    def _breaks(self, transfer: SendTransfer) -> bool:
        if not self._transport.breaks():
            return False
        self.break_off(transfer.key)
        return True

    def _end(
        self, transfer: SendTransfer, *, ok: bool, reason: str, tell: CancelTransfer | None = None
    ) -> None:
        if transfer.end(ok=ok, reason=reason, now=self._clock()):
            if tell is not None:
                self._send(transfer.peer_id, tell)
            ended = transfer.take_end()
            assert ended is not None
            self._post(ended)

    def _post(self, event: SendEvent) -> None:
        self._events.append(event)
        self._wake()


class SimReceiver(_Side):
    """A KVReceiver towards its scheduler."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        clock: NodeClock,
        wake: Callable[[], None],
        page_size: int,
    ) -> None:
        super().__init__(name, transport, clock, wake)
        self._page_size = page_size
        self._transfers: dict[ReqKey, ReceiveTransfer] = {}
        self._events: list[ReceiveEvent] = []

    @property
    def num_transfers(self) -> int:
        """Opened keys without a terminal event."""
        return len(self._transfers)

    def open(
        self,
        key: ReqKey,
        peer_id: str,
        page_ids: Sequence[int],
        prefix_pages: int,
        num_known: int | None = None,
    ) -> None:
        """As KVReceiver does."""
        assert key not in self._transfers and key not in self._over, f"{key} opened twice"
        transfer = ReceiveTransfer(
            key, peer_id, list(page_ids), prefix_pages, 1, self._page_size, 0.0, num_known
        )
        self._transfers[key] = transfer
        transfer.start(0.0)
        self._check_alive(peer_id)
        early = self._early.pop(key, ())
        if not early:
            self._send(peer_id, transfer.ready)
        for message in early:
            self.on_message(peer_id, message)

    def cancel(self, key: ReqKey, reason: str) -> None:
        """As KVReceiver does."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.fail(reason, by_peer=False):
            self._send(transfer.peer_id, CancelTransfer(key, reason))
            self._post(transfer)

    def poll(self) -> list[ReceiveEvent]:
        """What has ended since the last call."""
        events, self._events = self._events, []
        for event in events:
            del self._transfers[event.key]
            self._over[event.key] = event.reason if isinstance(event, ReceiveFailed) else "done"
        return events

    def on_message(self, peer: str, message: Message) -> None:
        """A sender has said something."""
        transfer = self._transfers.get(message.key)
        if transfer is None:
            self._is_early(peer, message)
            return
        if self._breaks(transfer):
            return
        try:
            match message:
                case Offer():
                    transfer.offered(message.first_page, message.num_pages, self._clock())
                case Handoff():
                    transfer.handed_off(message)
                    self._settle(transfer)
                case CancelTransfer(reason=reason):
                    if transfer.fail(reason, by_peer=True):
                        self._post(transfer)
        except TransferError as error:
            self._fail(transfer, str(error))

    def on_pages(self, peer: str, offer: Offer, nbytes: int) -> None:
        """The pages of an offer are here; they are dropped when the transfer has ended."""
        transfer = self._transfers.get(offer.key)
        chunk = Chunk(offer.first_page, offer.num_pages, 0, 1)
        if transfer is None or self._breaks(transfer) or transfer.begin_scatter(chunk) is None:
            return
        transfer.end_scatter(chunk, nbytes, self._clock())
        self._settle(transfer)

    def on_disconnected(self, peer: str) -> None:
        """A sender is gone."""
        for transfer in list(self._transfers.values()):
            if transfer.peer_id == peer and transfer.fail("the prefill node is gone", by_peer=False):
                self._post(transfer)

    def break_off(self, key: ReqKey) -> None:
        """A fault: the link of this transfer breaks now."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._fail(transfer, "the link broke (decode node)")

    def _settle(self, transfer: ReceiveTransfer) -> None:
        if transfer.complete():
            self._send(transfer.peer_id, Done(transfer.key, ok=True))
            self._post(transfer)

    def _breaks(self, transfer: ReceiveTransfer) -> bool:
        if not self._transport.breaks():
            return False
        self.break_off(transfer.key)
        return True

    def _fail(self, transfer: ReceiveTransfer, reason: str) -> None:
        if transfer.fail(reason, by_peer=False):
            self._send(transfer.peer_id, Done(transfer.key, ok=False, reason=reason))
            self._post(transfer)

    def _post(self, transfer: ReceiveTransfer) -> None:
        event = transfer.take_end()
        assert isinstance(event, Received | ReceiveFailed)
        self._events.append(event)
        self._wake()
