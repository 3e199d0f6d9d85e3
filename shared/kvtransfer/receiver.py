"""The decode node's side of KV transfer.

    open ──▶ Ready ──▶ chunks are granted, received, scattered ──▶ all pages and the Handoff ──▶ Received
The scheduler thread, which alone owns the allocator, reserves pages and opens transfers. The control thread
brings messages in. One data thread per link writes pages, each scatter between `begin_scatter` and
`end_scatter`. One lock guards all state and is never held across a scatter or a wait.

From `open` until the terminal event was polled, the pages belong to this side; afterwards nothing writes them.
"""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared import log
from shared.config import TransferOptions
from shared.errors import PeerMismatch, TransferError
from shared.kvtransfer.layout import Chunk, ChunkPlan, PageStore, check_layout
from shared.kvtransfer.leases import Heartbeat, Parking, Tombstones
from shared.kvtransfer.link import RECEIVER
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.links import Links
from shared.kvtransfer.receive_loop import ReceiveLoop
from shared.kvtransfer.states import Received, ReceiveEvent, ReceiveFailed, ReceiveState, ReceiveTransfer
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.messages import (
    CancelTransfer,
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
    PrefillToDecode,
    Ready,
    Refused,
    ReqKey,
    StoreSet,
)
from shared.protocol.outbox import Outbox

TICK_S = 0.01
"""`tick` looks at deadlines no more often than this."""

_Keyed = Offer | Handoff | CancelTransfer


@dataclass(slots=True)
class _Peer:
    """A prefill node that has said hello on a connection that is up."""

    heartbeat: Heartbeat
    transports: deque[str]
    """What both ends can use; the first is what the next link will use."""
    refused: str | None = None
    silent: bool = False
    num_failures: int = 0
    """Links lost in a row, none of which lasted."""
    rebuild_at: float = 0.0


class ReceiveSide:
    """All transfers that arrive at this decode node.

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
        self._plan = ChunkPlan.fit(
            num_layers=layout.num_layers,
            unit_nbytes=pages.gather_nbytes(1, 1),
            slot_nbytes=options.slot_nbytes,
        )
        self._lock = threading.RLock()
        self._peers: dict[str, _Peer] = {}
        self._transfers: dict[ReqKey, ReceiveTransfer] = {}
        self._tombstones: Tombstones[Done] = Tombstones(options.tombstone_s, options.max_tombstones)
        self._parking: Parking[_Keyed] = Parking(options.park_s, options.max_parked)
        self._events: list[ReceiveEvent] = []
        self._next_tick = 0.0
        self._ping_seq = 0
        self.num_links_opened = 0
        """Links ever begun; more than peers when some had to be rebuilt."""
        self._closed = False
        self._links: Links[ReceiveLoop] = Links(
            rank=RECEIVER,
            lock=self._lock,
            clock=clock,
            options=options,
            outbox=outbox,
            transports=transports,
            on_dead=self._link_died,
        )

    # ------------------------------------------------------------------------------ scheduler thread
    def open(self, key: ReqKey, peer_id: str, page_ids: Sequence[int], prefix_pages: int) -> None:
        """Take `page_ids`, reserved for sequence pages from `prefix_pages` on, and ask the peer for them.

        The peer need not be connected yet. More pages may be reserved than will come. A key is opened once.
        """
        with self._lock:
            assert key not in self._transfers and key not in self._tombstones, f"{key} opened twice"
            transfer = ReceiveTransfer(
                key=key,
                peer_id=peer_id,
                page_ids=list(page_ids),
                prefix_pages=prefix_pages,
                num_layers=self._layout.num_layers,
                page_size=self._layout.page_size,
                deadline=self._clock() + self._options.connect_timeout_s,
            )
            self._transfers[key] = transfer
            if self._closed:
                self._fail(transfer, "this node is shutting down", tell=None)
                return
            self._try_start(transfer)
            for message in self._parking.take(key, peer_id):
                self._apply(transfer, message)

    def cancel(self, key: ReqKey, reason: str) -> None:
        """Give the transfer up; ReceiveFailed follows when nothing writes its pages any more. No-op once ended."""
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is None:
                assert key in self._tombstones or self._closed, f"{key} was never opened"
                return
            self._fail(transfer, reason, tell=CancelTransfer(key, reason))

    def poll(self) -> list[ReceiveEvent]:
        """What has ended since the last call."""
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
            for transfer in list(self._transfers.values()):
                self._check_deadline(transfer, now)
            for peer_id, key in self._parking.expire(now):
                self._outbox.send(peer_id, CancelTransfer(key, "the request never came to the decode node"))
            self._tombstones.expire(now)
            for peer_id, peer in list(self._peers.items()):
                self._check_peer(peer_id, peer, now)

    def close(self) -> None:
        """Fail every transfer, end every link; returns when all threads are gone. `poll` still works."""
        with self._lock:
            self._closed = True
            workers = self._links.fail_all("the decode node is shutting down")
            for transfer in list(self._transfers.values()):
                self._fail(transfer, "this node is shutting down", tell=None)
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
        """Each peer that said hello: refused, silent, linked, linking, or backing off before the next link."""
        with self._lock:
            return {peer_id: self._peer_state(peer_id, peer) for peer_id, peer in self._peers.items()}

    # -------------------------------------------------------------------------------- control thread
    def on_disconnected(self, peer_id: str, reason: str) -> None:
        """The control connection is gone, and with it every transfer under way from that peer."""
        with self._lock:
            if self._peers.pop(peer_id, None) is not None:
                self._links.fail_peer(peer_id, reason, tell_peer=False)

    @property
    def renewal_s(self) -> float:
        """`renew_leases` is to be called this often."""
        return self._options.lease_s / 3

    def renew_leases(self) -> None:
        """Tell each peer which transfers still want their pages.

        The scheduler thread does not do this, since a step of its loop may last longer than a lease.
        """
        with self._lock:
            keys = defaultdict(list)
            for transfer in self._transfers.values():
                if transfer.state is ReceiveState.RECEIVING:
                    keys[transfer.peer_id].append(transfer.key)
            for peer_id, living in keys.items():
                self._outbox.send(peer_id, LeaseRenew(tuple(living)))

    def on_message(self, peer_id: str, message: PrefillToDecode) -> None:
        """A message of a prefill node. Never blocks."""
        with self._lock:
            if self._closed:
                return
            peer = self._peers.get(peer_id)
            if peer is not None:
                peer.heartbeat.heard(self._clock())
                peer.silent = False
            match message:
                case Offer() | Handoff() | CancelTransfer():
                    self._keyed(peer_id, message)
                case PeerHello():
                    self._met(peer_id, message)
                case StoreSet():
                    self._links.feed(peer_id, message)
                case LinkLost():
                    self._links.lost(peer_id, message)
                case PeerPing():
                    if peer is not None:  # a stranger's pings stay unanswered, so that it says hello again
                        self._outbox.send(peer_id, PeerPong(message.seq))
                case PeerPong():
                    pass

    # ----------------------------------------------------------------------------------- data thread
    def wants(self, key: ReqKey) -> bool:
        """See ScatterGate."""
        with self._lock:
            transfer = self._transfers.get(key)
            return transfer is not None and transfer.state is ReceiveState.RECEIVING

    def begin_scatter(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        """See ScatterGate."""
        with self._lock:
            transfer = self._transfers.get(key)
            return None if transfer is None else transfer.begin_scatter(chunk)

    def end_scatter(self, key: ReqKey, chunk: Chunk, nbytes: int) -> None:
        """See ScatterGate."""
        with self._lock:
            transfer = self._transfers[key]  # a transfer leaves the table only after its last scatter
            transfer.end_scatter(chunk, nbytes)
            self._progressed(transfer)
            self._settle(transfer)

    def refused(self, key: ReqKey, reason: str, *, by_peer: bool) -> None:
        """See ScatterGate."""
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is not None:
                self._fail(transfer, reason, tell=Done(key, False, reason), by_peer=by_peer)

    # --------------------------------------------------------------------------------- under the lock
    def _keyed(self, peer_id: str, message: _Keyed) -> None:
        transfer = self._transfers.get(message.key)
        if transfer is not None:
            if transfer.peer_id == peer_id:
                self._apply(transfer, message)
            return
        epitaph = self._tombstones.get(message.key)
        if epitaph is not None:
            if not isinstance(message, CancelTransfer):
                self._outbox.send(peer_id, epitaph)
            return
        evicted = self._parking.park(message.key, peer_id, message, self._clock())
        if evicted is not None:
            self._outbox.send(
                evicted[0], CancelTransfer(evicted[1], "too many transfers are waiting for their request")
            )

    def _apply(self, transfer: ReceiveTransfer, message: _Keyed) -> None:
        if isinstance(message, CancelTransfer):
            self._fail(transfer, message.reason, tell=None, by_peer=True)
            return
        if transfer.state is not ReceiveState.RECEIVING:
            return  # before our Ready the peer knows no prefix to count from; after the end nothing counts
        try:
            match message:
                case Offer():
                    self._offered(transfer, message)
                case Handoff():
                    transfer.handed_off(message)
        except TransferError as error:
            self._fail(transfer, str(error), tell=Done(transfer.key, False, str(error)))
            return
        self._progressed(transfer)
        self._settle(transfer)

    def _offered(self, transfer: ReceiveTransfer, offer: Offer) -> None:
        if not transfer.offered(offer.first_page, offer.num_pages, self._clock()):
            return
        loop = self._links.loop(transfer.peer_id)
        assert loop is not None, "a transfer outlived its link"
        loop.enqueue(transfer.key, self._plan.cut(offer.first_page, offer.num_pages))

    def _progressed(self, transfer: ReceiveTransfer) -> None:
        now = self._clock()
        options = self._options
        transfer.deadline = now + (
            options.offer_timeout_s if transfer.has_all_offered else options.transfer_timeout_s
        )
        if transfer.complete(now):
            self._outbox.send(transfer.peer_id, Done(transfer.key, True))

    def _met(self, peer_id: str, hello: PeerHello) -> None:
        self._links.fail_peer(peer_id, "the peer connected anew", tell_peer=False)
        now = self._clock()
        peer = _Peer(Heartbeat(self._options.ping_s, self._options.peer_timeout_s, now), deque())
        self._peers[peer_id] = peer
        try:
            check_layout(self._layout, hello.layout)
            peer.transports.extend(self._transports.in_common(hello.transports, hello.host))
        except PeerMismatch as error:
            peer.refused = str(error)
            log.warn("peer_refused", peer=peer_id, reason=peer.refused)
            self._outbox.send(peer_id, Refused(peer.refused))
            for transfer in list(self._transfers.values()):
                if transfer.peer_id == peer_id:
                    self._fail(transfer, peer.refused, tell=None)
            return
        self._open_link(peer_id, peer)

    def _open_link(self, peer_id: str, peer: _Peer) -> None:
        self.num_links_opened += 1
        name = f"{peer_id}>{self._node.node_id}/{self._node.incarnation}#{self.num_links_opened}"
        secret, transport = secrets.token_bytes(32), peer.transports[0]

        def send_grant(grant: Grant) -> None:
            self._outbox.send(peer_id, grant)

        loop = ReceiveLoop(
            name=name,
            pages=self._pages,
            gate=self,
            send_grant=send_grant,
        )
        # LinkOpen goes out before anything that the worker may send about the link.
        self._outbox.send(peer_id, LinkOpen(name, self._node, secret, transport))
        self._links.begin(peer_id, name, secret, transport, loop)
        for transfer in list(self._transfers.values()):
            if transfer.peer_id == peer_id:
                self._try_start(transfer)

    def _try_start(self, transfer: ReceiveTransfer) -> None:
        """Send Ready if the peer has a link, built or being built: the transfer lives and dies with it."""
        peer = self._peers.get(transfer.peer_id)
        if transfer.state is not ReceiveState.RESERVED or peer is None:
            return
        if peer.refused is not None:
            self._fail(transfer, peer.refused, tell=None)
        elif self._links.worker(transfer.peer_id) is not None:
            transfer.start(self._clock() + self._options.offer_timeout_s)
            self._outbox.send(transfer.peer_id, Ready(transfer.key, transfer.prefix_pages))

    def _link_died(self, worker: LinkWorker, reason: str) -> None:
        peer, now = self._peers.get(worker.peer_id), self._clock()
        if peer is not None:
            lasted = worker.live_at is not None and now - worker.live_at >= self._options.rebuild_max_s
            peer.num_failures = 1 if lasted else peer.num_failures + 1
            pause = self._options.rebuild_min_s * 2 ** min(peer.num_failures - 1, 30)
            peer.rebuild_at = now + min(pause, self._options.rebuild_max_s)
            # It could not be built, and not because either node was going or gone: the next transport is tried.
            of_itself = not self._closed and not peer.heartbeat.silent(now)
            if worker.live_at is None and of_itself and len(peer.transports) > 1:
                peer.transports.rotate(-1)
                log.warn("transport_fallback", link=worker.name, to=peer.transports[0], reason=reason)
        for transfer in list(self._transfers.values()):
            if transfer.peer_id == worker.peer_id and transfer.state is ReceiveState.RECEIVING:
                text = f"link lost: {reason}"
                self._fail(transfer, text, tell=Done(transfer.key, False, text))

    def _check_deadline(self, transfer: ReceiveTransfer, now: float) -> None:
        if now < transfer.deadline:
            return
        if transfer.state is ReceiveState.RESERVED:
            reason = f"no link to prefill node {transfer.peer_id} came up in time"
        elif transfer.has_all_offered:
            reason = f"no pages were offered for {self._options.offer_timeout_s:g} s"
        else:
            reason = f"no progress for {self._options.transfer_timeout_s:g} s"
        self._fail(transfer, reason, tell=Done(transfer.key, False, reason))

    def _check_peer(self, peer_id: str, peer: _Peer, now: float) -> None:
        if peer.heartbeat.silent(now):
            if not peer.silent:
                log.warn("peer_silent", peer=peer_id)
            peer.silent = True
            self._links.fail_peer(peer_id, f"silent for {self._options.peer_timeout_s:g} s")
            if peer.heartbeat.silence(now) >= self._options.forget_peer_s:
                del self._peers[peer_id]  # the listening end of a connection is not told that it broke
                return
        if peer.heartbeat.ping_due(now):
            self._ping_seq += 1
            self._outbox.send(peer_id, PeerPing(self._ping_seq))
        idle = self._links.worker(peer_id) is None and peer.refused is None and not peer.silent
        if idle and now >= peer.rebuild_at:
            self._open_link(peer_id, peer)

    def _peer_state(self, peer_id: str, peer: _Peer) -> str:
        worker = self._links.worker(peer_id)
        if peer.refused is not None:
            return "refused"
        if peer.silent:
            return "silent"
        if worker is None:
            return "backing off"
        return "linked" if worker.live else "linking"

    def _fail(
        self,
        transfer: ReceiveTransfer,
        reason: str,
        *,
        tell: Done | CancelTransfer | None,
        by_peer: bool = False,
    ) -> None:
        if not transfer.fail(reason, by_peer=by_peer):
            return
        if tell is not None:
            self._outbox.send(transfer.peer_id, tell)
        self._settle(transfer)

    def _settle(self, transfer: ReceiveTransfer) -> None:
        """Post the terminal event as soon as no scatter writes the pages."""
        end = transfer.take_end()
        if end is None:
            return
        del self._transfers[transfer.key]
        match end:
            case Received():
                epitaph = Done(transfer.key, True)
            case ReceiveFailed():
                epitaph = Done(transfer.key, False, end.reason)
        self._tombstones.bury(transfer.key, epitaph, self._clock())
        self._events.append(end)
        self._wake()
