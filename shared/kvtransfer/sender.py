"""The prefill node's side of KV transfer.

    open ──Ready──▶ offer, offer, ... ──▶ handoff ──Done──▶ SendEnded
The scheduler thread opens transfers, offers pages as they are computed, and polls for events. The control
thread brings messages in. One data thread per link reads pages, each gather between `begin_gather` and
`end_gather`. One lock guards all state and is never held across a gather or a wait.

From `offer` until SendEnded was polled, the caller keeps the offered pages allocated and unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared import log
from shared.config import TransferOptions
from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk, PageStore
from shared.kvtransfer.leases import Heartbeat, Parking, Tombstones
from shared.kvtransfer.link import SENDER
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.links import Links
from shared.kvtransfer.send_loop import SendLoop
from shared.kvtransfer.staging import SlotRing
from shared.kvtransfer.states import SendEnded, SendEvent, SendState, SendTransfer
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.messages import (
    CancelTransfer,
    DecodeToPrefill,
    Done,
    Grant,
    Handoff,
    KVLayout,
    LeaseRenew,
    LinkLost,
    LinkOpen,
    NodeRef,
    Offer,
    PeerHello,
    PeerPing,
    PeerPong,
    Ready,
    Refused,
    ReqKey,
    StoreSet,
)
from shared.protocol.outbox import Outbox

TICK_S = 0.01
"""`tick` looks at deadlines no more often than this."""

_Keyed = Ready | Done | CancelTransfer


@dataclass(slots=True)
class _Peer:
    """A decode node whose control connection is up."""

    heartbeat: Heartbeat
    hello_at: float
    refused: str | None = None
    silent: bool = False


class SendSide:
    """All transfers that leave this prefill node.

    `wake` tells the scheduler that `poll` has something; it is called from any thread, under the side's lock,
    and must only signal.
    """

    def __init__(
        self,
        *,
        node: NodeRef,
        layout: KVLayout,
        pages: PageStore,
        outbox: Outbox,
        transports: Transports,
        clock: Callable[[], float],
        options: TransferOptions,
        wake: Callable[[], None],
    ) -> None:
        self._node = node
        self._layout = layout
        self._pages = pages
        self._outbox = outbox
        self._transports = transports
        self._clock = clock
        self._options = options
        self._wake = wake
        self._lock = threading.RLock()
        self._peers: dict[str, _Peer] = {}
        self._transfers: dict[ReqKey, SendTransfer] = {}
        self._tombstones: Tombstones[str] = Tombstones(options.tombstone_s, options.max_tombstones)
        self._parking: Parking[_Keyed] = Parking(options.park_s, options.max_parked)
        self._events: list[SendEvent] = []
        self._next_tick = 0.0
        self._ping_seq = 0
        self._closed = False
        self._links: Links[SendLoop] = Links(
            rank=SENDER,
            lock=self._lock,
            clock=clock,
            options=options,
            outbox=outbox,
            transports=transports,
            on_dead=self._link_died,
        )

    # ------------------------------------------------------------------------------ scheduler thread
    def open(self, key: ReqKey, peer_id: str) -> None:
        """The router asked for `key` to be prefilled for the decode node `peer_id`. A key is opened once."""
        with self._lock:
            assert key not in self._transfers and key not in self._tombstones, f"{key} opened twice"
            now = self._clock()
            transfer = SendTransfer(key, peer_id, now, now + self._options.ready_timeout_s)
            self._transfers[key] = transfer
            if self._closed:
                self._end(transfer, "this node is shutting down", tell_peer=False)
                return
            peer = self._peers.get(peer_id)
            if peer is not None and peer.refused is not None:
                self._end(transfer, peer.refused, tell_peer=False)
            for message in self._parking.take(key, peer_id):
                self._apply(transfer, message)

    def prefix_pages(self, key: ReqKey) -> int | None:
        """Pages at the start of the sequence that need not be sent; None until Ready came."""
        with self._lock:
            transfer = self._transfers.get(key)
            return None if transfer is None else transfer.prefix_pages

    def offer(self, key: ReqKey, page_ids: Sequence[int]) -> None:
        """These pages, the next of the sequence from `prefix_pages` on, are computed and held. No-op once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is None or not page_ids:
                return
            first_page = transfer.offer(list(page_ids), self._clock())
            self._outbox.send(transfer.peer_id, Offer(key, first_page, len(page_ids)))

    def handoff(self, key: ReqKey, handoff: Handoff) -> None:
        """Everything is offered; send the record that lets the decode node go on. No-op once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is None:
                return
            assert handoff.key == key
            transfer.handoff(handoff.total_pages, self._clock() + self._options.lease_s)
            self._outbox.send(transfer.peer_id, handoff)

    def cancel(self, key: ReqKey, reason: str) -> None:
        """Give the transfer up; SendEnded follows when nobody reads its pages any more. No-op once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is not None:
                self._end(transfer, reason, tell_peer=True)

    def poll(self) -> list[SendEvent]:
        """What has happened since the last call."""
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
            return events

    def tick(self) -> None:
        """Enforce deadlines, leases and liveness. Cheap to call in every round of the loop."""
        now = self._clock()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        with self._lock:
            if self._closed:
                return
            for transfer in list(self._transfers.values()):
                self._check_deadline(transfer, now)
            for peer_id, key in self._parking.expire(now):
                self._outbox.send(peer_id, CancelTransfer(key, "the request never came to the prefill node"))
            self._tombstones.expire(now)
            for peer_id, peer in self._peers.items():
                self._check_peer(peer_id, peer, now)

    def close(self) -> None:
        """Fail every transfer, end every link; returns when all threads are gone. `poll` still works."""
        with self._lock:
            self._closed = True
            workers = self._links.fail_all("the prefill node is shutting down")
            for transfer in list(self._transfers.values()):
                self._end(transfer, "this node is shutting down", tell_peer=True)
            self._peers.clear()
        self._links.join(workers)

    @property
    def num_links(self) -> int:
        """Links that are ready for use."""
        with self._lock:
            return self._links.num_live

    @property
    def links_by_transport(self) -> dict[str, int]:
        """Links that are ready for use, counted by what carries them."""
        with self._lock:
            return self._links.live_by_transport

    @property
    def unreachable(self) -> dict[str, str]:
        """Connected peers to which pages cannot travel now, and why; a link that is being built is none of them."""
        with self._lock:
            refused = {peer_id: peer.refused for peer_id, peer in self._peers.items() if peer.refused}
            return self._links.broken(self._peers) | refused

    @property
    def num_transfers(self) -> int:
        """Opened keys without a terminal event."""
        return len(self._transfers)

    @property
    def num_slots_out(self) -> int:
        """Staging slots in use, those that ops of dead links still hold included. 0 when idle."""
        with self._lock:
            return self._links.num_slots_out

    def peer_states(self) -> dict[str, str]:
        """Each connected peer: refused, silent, linked, linking, or connected (no link yet)."""
        with self._lock:
            return {peer_id: self._peer_state(peer_id, peer) for peer_id, peer in self._peers.items()}

    # -------------------------------------------------------------------------------- control thread
    def on_connected(self, peer_id: str) -> None:
        """The control connection to a decode node is up, for the first time or again."""
        with self._lock:
            if self._closed:
                return
            if peer_id in self._peers:
                self.on_disconnected(peer_id, "the control connection was replaced")
            now = self._clock()
            heartbeat = Heartbeat(self._options.ping_s, self._options.peer_timeout_s, now)
            self._peers[peer_id] = _Peer(heartbeat, now)
            self._say_hello(peer_id)

    def on_disconnected(self, peer_id: str, reason: str) -> None:
        """The control connection is gone, and with it every transfer to that peer."""
        with self._lock:
            if self._peers.pop(peer_id, None) is None:
                return
            self._links.fail_peer(peer_id, reason, tell_peer=False)
            self._parking.drop_peer(peer_id)
            self._fail_transfers(peer_id, reason, waiting_too=True, tell_peer=False)

    def on_message(self, peer_id: str, message: DecodeToPrefill) -> None:
        """A message of a decode node. Never blocks."""
        with self._lock:
            peer = self._peers.get(peer_id)
            if self._closed or peer is None:
                return
            peer.heartbeat.heard(self._clock())
            peer.silent = False
            match message:
                case Grant():
                    self._granted(peer_id, message)
                case Ready() | Done() | CancelTransfer():
                    self._keyed(peer_id, message)
                case LeaseRenew():
                    self._renewed(peer_id, message)
                case LinkOpen():
                    self._open_link(peer_id, peer, message)
                case StoreSet():
                    self._links.feed(peer_id, message)
                case LinkLost():
                    self._links.lost(peer_id, message)
                case Refused():
                    log.warn("peer_refused_us", peer=peer_id, reason=message.reason)
                    peer.refused = message.reason
                    self._links.fail_peer(peer_id, message.reason, tell_peer=False)
                    self._fail_transfers(peer_id, message.reason, waiting_too=True, tell_peer=False)
                case PeerPing():
                    self._outbox.send(peer_id, PeerPong(message.seq))
                case PeerPong():
                    pass

    # ----------------------------------------------------------------------------------- data thread
    def begin_gather(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        """See GatherGate."""
        with self._lock:
            transfer = self._transfers.get(key)
            return None if transfer is None else transfer.begin_gather(chunk)

    def end_gather(self, key: ReqKey, nbytes: int) -> None:
        """See GatherGate."""
        with self._lock:
            transfer = self._transfers[key]  # a transfer leaves the table only after its last gather
            transfer.end_gather(nbytes)
            self._settle(transfer)

    # --------------------------------------------------------------------------------- under the lock
    def _living(self, key: ReqKey) -> SendTransfer | None:
        """The transfer, or None when it has ended. A key that was never opened is the caller's mistake."""
        transfer = self._transfers.get(key)
        if transfer is None:
            assert key in self._tombstones or self._closed, f"{key} was never opened"
            return None
        return None if transfer.state is SendState.ENDED else transfer

    def _keyed(self, peer_id: str, message: _Keyed) -> None:
        transfer = self._transfers.get(message.key)
        if transfer is not None:
            if transfer.peer_id == peer_id:
                self._apply(transfer, message)
            return
        epitaph = self._tombstones.get(message.key)
        if epitaph is not None:
            if isinstance(message, Ready):
                self._outbox.send(peer_id, CancelTransfer(message.key, epitaph))
            return
        evicted = self._parking.park(message.key, peer_id, message, self._clock())
        if evicted is not None:
            self._outbox.send(
                evicted[0], CancelTransfer(evicted[1], "too many requests are waiting for their prompt")
            )

    def _apply(self, transfer: SendTransfer, message: _Keyed) -> None:
        match message:
            case Ready():
                if transfer.ready(message.prefix_pages):
                    self._post(message)
            case Done(ok=True) if transfer.state is SendState.HANDED_OFF:
                self._end(transfer, "", tell_peer=False, ok=True)
            case Done():
                reason = message.reason or "the decode node ended the transfer before the handoff"
                self._end(transfer, reason, tell_peer=False)
            case CancelTransfer():
                self._end(transfer, f"cancelled by the decode node: {message.reason}", tell_peer=False)

    def _renewed(self, peer_id: str, message: LeaseRenew) -> None:
        lease_until = self._clock() + self._options.lease_s
        for key in message.keys:
            transfer = self._transfers.get(key)
            if transfer is not None:
                if transfer.peer_id == peer_id:
                    transfer.renew(lease_until)
            elif (epitaph := self._tombstones.get(key)) is not None:
                self._outbox.send(peer_id, CancelTransfer(key, epitaph))

    def _granted(self, peer_id: str, grant: Grant) -> None:
        loop = self._links.loop(peer_id, grant.link)
        if loop is None:
            self._outbox.send(peer_id, LinkLost(grant.link, "there is no such link here"))
            return
        try:
            loop.accept(grant)
        except LinkError as error:
            self._links.fail_peer(peer_id, str(error))

    def _say_hello(self, peer_id: str) -> None:
        offered = tuple(self._transports.factories)
        self._outbox.send(peer_id, PeerHello(self._node, self._layout, offered, self._transports.host))

    def _open_link(self, peer_id: str, peer: _Peer, message: LinkOpen) -> None:
        if self._links.known(message.link):
            return
        factory = self._transports.factories.get(message.transport)
        if factory is None:
            reason = f"kv_transfer: {message.transport} was not offered"
            self._outbox.send(peer_id, LinkLost(message.link, reason))
            return
        self._links.fail_peer(peer_id, "replaced by another incarnation")
        # A Ready that came before this LinkOpen spoke of the old link.
        self._fail_transfers(peer_id, "the link was replaced", waiting_too=False, tell_peer=True)
        peer.refused = None
        peer.hello_at = self._clock()
        options = self._options
        ring = SlotRing(options.num_slots, options.slot_nbytes, factory.new_slot)
        loop = SendLoop(
            ring=ring,
            pages=self._pages,
            num_layers=self._layout.num_layers,
            gate=self,
            copier=factory.new_copier(message.link),
        )
        self._links.begin(peer_id, message.link, message.secret, message.transport, loop)

    def _link_died(self, worker: LinkWorker, reason: str) -> None:
        peer = self._peers.get(worker.peer_id)
        if peer is not None:
            peer.hello_at = self._clock()
        self._fail_transfers(worker.peer_id, f"link lost: {reason}", waiting_too=False, tell_peer=True)

    def _fail_transfers(self, peer_id: str, reason: str, *, waiting_too: bool, tell_peer: bool) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.peer_id == peer_id and (waiting_too or transfer.state is not SendState.WAITING):
                self._end(transfer, reason, tell_peer=tell_peer)

    def _check_deadline(self, transfer: SendTransfer, now: float) -> None:
        if transfer.deadline is None or transfer.state is SendState.ENDED:
            return
        if now >= transfer.deadline:
            waiting = transfer.state is SendState.WAITING
            reason = (
                "the decode node reserved no pages in time" if waiting else "the lease ended without renewal"
            )
            self._end(transfer, reason, tell_peer=True)
        elif (
            transfer.peer_id not in self._peers
            and now - transfer.opened_at >= self._options.connect_timeout_s
        ):
            self._end(transfer, f"no connection to decode node {transfer.peer_id}", tell_peer=False)

    def _check_peer(self, peer_id: str, peer: _Peer, now: float) -> None:
        if peer.heartbeat.silent(now):
            if not peer.silent:
                log.warn("peer_silent", peer=peer_id)
            peer.silent = True
            reason = f"silent for {self._options.peer_timeout_s:g} s"
            self._links.fail_peer(peer_id, reason)
            self._fail_transfers(peer_id, reason, waiting_too=True, tell_peer=True)
        if peer.heartbeat.ping_due(now):
            self._ping_seq += 1
            self._outbox.send(peer_id, PeerPing(self._ping_seq))
        # Also to a silent peer: it may be one that has forgotten us and therefore leaves pings unanswered.
        unlinked = self._links.worker(peer_id) is None and peer.refused is None
        if unlinked and now - peer.hello_at >= self._options.hello_retry_s:
            peer.hello_at = now
            self._say_hello(peer_id)

    def _peer_state(self, peer_id: str, peer: _Peer) -> str:
        worker = self._links.worker(peer_id)
        if peer.refused is not None:
            return "refused"
        if peer.silent:
            return "silent"
        if worker is None:
            return "connected"
        return "linked" if worker.live else "linking"

    def _end(self, transfer: SendTransfer, reason: str, *, tell_peer: bool, ok: bool = False) -> None:
        if not transfer.end(ok=ok, reason=reason, now=self._clock()):
            return
        if tell_peer:
            self._outbox.send(transfer.peer_id, CancelTransfer(transfer.key, reason))
        self._settle(transfer)

    def _settle(self, transfer: SendTransfer) -> None:
        """Post the terminal event as soon as no gather reads the pages."""
        end: SendEnded | None = transfer.take_end()
        if end is not None:
            del self._transfers[transfer.key]
            self._tombstones.bury(transfer.key, end.reason or "done", self._clock())
            self._post(end)

    def _post(self, event: SendEvent) -> None:
        self._events.append(event)
        self._wake()
