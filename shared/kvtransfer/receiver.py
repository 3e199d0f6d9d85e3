"""KVReceiver: the pages that arrive at a node.

    open ──▶ Ready ──▶ chunks are granted, received, scattered ──▶ all pages and the Handoff ──▶ Received
The scheduler thread, which alone owns the allocator, reserves pages and opens transfers. The control thread
brings messages in. One data thread per link writes pages, each scatter between `begin_scatter` and
`end_scatter`. One lock guards all state and is never held across a scatter or a wait.

From `open` until the terminal event was polled, the pages belong to this side; afterwards nothing writes them.
"""

from __future__ import annotations

import secrets
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared import log
from shared.errors import ConfigError, PeerMismatch, TransferError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.receive_worker import ReceiveWorker
from shared.kvtransfer.side import KeyedInbox, Peer, Side
from shared.kvtransfer.staging import Chunk, ChunkPlan
from shared.kvtransfer.states import (
    Received,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveState,
    ReceiveTransfer,
)
from shared.kvtransfer.transports.choice import better_than
from shared.protocol.messages import KVLayout, Refused, ReqKey, other_version
from shared.protocol.transfer_messages import (
    CancelTransfer,
    Done,
    Handoff,
    LeaseRenew,
    LinkLost,
    LinkOpen,
    Offer,
    PeerHello,
    PeerLeft,
    PeerPing,
    PeerPong,
    SenderToReceiver,
    StoreSet,
)

_Keyed = Offer | Handoff | CancelTransfer


@dataclass(slots=True, kw_only=True)
class SendingNode(Peer[ReceiveWorker]):
    """A node that has introduced itself, and the link that this one builds with it next."""

    plans: tuple[ChunkPlan, ...]
    """How pages from this peer are cut, so that they fit the slots of both ends. Each group of layers has a plan."""
    transports: deque[str] = field(default_factory=deque)
    """What both ends can use; the first is what the next link will use."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """What is not used, and why."""
    num_failures: int = 0
    """Links lost in a row, none of which lasted."""
    rebuild_at: float = 0.0


class KVReceiver(Side[ReceiveTransfer, ReceiveEvent, SendingNode]):
    """All transfers that arrive at this node.

    A sending node introduces itself (PeerHello). This node answers with Refused, or opens a link: it decides when a
    link is built, over which transport, and when the next one follows one that died.
    """

    called = "receiving node"

    def __init__(self, own: Endpoint) -> None:
        super().__init__(own)
        self.transfers: KeyedInbox[ReceiveTransfer, _Keyed, Done] = KeyedInbox(
            own=own, apply=self._apply, answer_late=_answer_late, called=self.called
        )
        self.num_links_opened = 0
        """Links ever begun; more than peers when some had to be rebuilt."""
        self._own_plans = self._plans(own.transports.slot_nbytes)

    # ------------------------------------------------------------------------------ scheduler thread
    def open(
        self,
        key: ReqKey,
        peer_id: str,
        page_ids: Sequence[int],
        prefix_pages: int,
        num_known: int | None = None,
        window_ids: Sequence[int] = (),
    ) -> None:
        """Take `page_ids`, reserved for sequence pages from `prefix_pages` on, and ask the peer for them.

        `window_ids` are the window page of each, 0 for none; empty for a model without windows.
        The peer need not be connected yet. More pages may be reserved than will come. A key is opened once. Of a
        request that moves here while it runs, the first `num_known` tokens are known; its pages are in no hurry.
        """
        with self._lock:
            transfer = ReceiveTransfer(
                key=key,
                peer_id=peer_id,
                page_ids=list(page_ids),
                window_ids=list(window_ids),
                prefix_pages=prefix_pages,
                num_layers=self._own.layout.num_layers,
                page_size=self._own.layout.page_size,
                windows=self._own.layout.windows,
                deadline=self._clock() + self._options.connect_timeout_s,
                num_known=num_known,
            )
            self.transfers.open(transfer)
            if self._closed:
                self._fail(transfer, "this node is shutting down", tell=None)
                return
            self._try_start(transfer)
            self.transfers.take_parked(transfer)

    # -------------------------------------------------------------------------------- control thread
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
            for transfer in self.transfers:
                if transfer.state is ReceiveState.RECEIVING:
                    keys[transfer.peer_id].append(transfer.key)
            for peer_id, living in keys.items():
                self._outbox.send(peer_id, LeaseRenew(tuple(living)))

    def on_message(self, peer_id: str, message: SenderToReceiver) -> None:
        """Handle a message of a sending node. Never blocks."""
        with self._lock:
            if self._closed:
                return
            now = self._clock()
            peer = self._heard(peer_id, now)
            match message:
                case Offer() | Handoff() | CancelTransfer():
                    self.transfers.receive(peer_id, message, now)
                case PeerHello():
                    self._met(peer_id, message)
                case PeerLeft():
                    self._forget(peer_id, "the sending node has left", tell_peer=False)
                case StoreSet() | LinkLost() | PeerPing() | PeerPong() if peer is not None:
                    self._take(peer, message)

    # ------------------------------------------------------------------------------------ data thread
    def wants(self, key: ReqKey) -> bool:
        """Whether chunks of this transfer are still to be granted."""
        with self._lock:
            transfer = self.transfers.get(key)
            return transfer is not None and transfer.state is ReceiveState.RECEIVING

    def is_hurried(self) -> bool:
        """Whether pages are on their way here that go before bulk pages."""
        with self._lock:
            return any(not transfer.is_bulk and not transfer.has_all_offered for transfer in self.transfers)

    def begin_scatter(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        """The pages to write, which stay the transfer's until `end_scatter`; None: it has ended, drop the chunk."""
        with self._lock:
            transfer = self.transfers.get(key)
            return None if transfer is None else transfer.begin_scatter(chunk)

    def end_scatter(self, key: ReqKey, chunk: Chunk, nbytes: int) -> None:
        """Count a scatter, whose pages have been written."""
        with self._lock:
            transfer = self.transfers.get(key)
            assert transfer is not None, "a transfer is closed only after its last scatter"
            transfer.end_scatter(chunk, nbytes, self._clock())
            self._progressed(transfer)
            self._settle(transfer)

    def refused(self, key: ReqKey, reason: str, *, corrupt: bool = False) -> None:
        """Fail the transfer of a chunk that cannot be used."""
        with self._lock:
            transfer = self.transfers.get(key)
            if transfer is not None:
                if corrupt:
                    log.warn("corrupt_pages", **key.fields, sent_by=transfer.peer_id, reason=reason)
                self._fail(transfer, reason, tell=Done(key, False, reason, corrupt), corrupt=corrupt)

    # ----------------------------------------------------------------------- peers, under the lock
    def _met(self, peer_id: str, hello: PeerHello) -> None:
        self.end_link_of(peer_id, "the peer connected anew", tell_peer=False)
        peer = SendingNode(peer_id=peer_id, heartbeat=self._heartbeat(), plans=self._own_plans)
        self._meet(peer)
        transports, mixed = self._own.transports, self._options.allow_mixed_numerics
        try:
            if why := other_version("sending node", hello.version):
                raise PeerMismatch(why)
            check_layout(self._own.layout, hello.layout, allow_mixed_numerics=mixed)
            usable, passed_over = transports.in_common(hello.transports, hello.place)
            peer.transports.extend(usable)
            peer.passed_over |= passed_over
            peer.plans = self._plans(min(hello.slot_nbytes, transports.slot_nbytes))
        except (PeerMismatch, ConfigError) as error:
            peer.refused = str(error)
            log.warn("peer_refused", peer=peer_id, reason=peer.refused)
            self._outbox.send(peer_id, Refused(peer.refused))
            self._start_transfers(peer_id)
            return
        self._open_link(peer)

    def _plans(self, slot_nbytes: int) -> tuple[ChunkPlan, ...]:
        unit_nbytes = self._own.pages.gather_nbytes(1, 1)
        return ChunkPlan.of_groups(self._own.layout, unit_nbytes=unit_nbytes, slot_nbytes=slot_nbytes)

    def _open_link(self, peer: SendingNode) -> None:
        self.num_links_opened += 1
        own, transport = self._own.node, peer.transports[0]
        name = f"{peer.peer_id}>{own.node_id}/{own.incarnation}#{self.num_links_opened}"
        passed_over = better_than(transport, peer.passed_over)
        opening = LinkOpen(name, own, secrets.token_bytes(32), transport, passed_over)
        # LinkOpen goes out before anything that the worker may send about the link.
        self._outbox.send(peer.peer_id, opening)
        self._begin(peer, ReceiveWorker(self._own, peer.peer_id, opening, self))
        self._start_transfers(peer.peer_id)

    def _check_peer(self, peer: SendingNode, silence: str | None, now: float) -> None:
        """Forget one that is silent for long, and open the link of each that may have one and has none.

        ZeroMQ does not tell the listening end of a connection that it broke.
        """
        if silence is not None and peer.heartbeat.silence(now) >= self._options.forget_peer_s:
            del self._peers[peer.peer_id]
        elif peer.link is None and peer.refused is None and not peer.silent and now >= peer.rebuild_at:
            self._open_link(peer)

    def _link_died(self, link: LinkWorker, peer: SendingNode | None, reason: str) -> None:
        if peer is not None:
            self._choose_next_link(peer, link, reason)
        for transfer in self.transfers.of_peer(link.peer_id):
            if transfer.state is ReceiveState.RECEIVING:
                text = f"link lost: {reason}"
                self._fail(transfer, text, tell=Done(transfer.key, False, text))

    def _choose_next_link(self, peer: SendingNode, link: LinkWorker, reason: str) -> None:
        """When the link after `link`, which is dead, is built, and over which transport."""
        now, options = self._clock(), self._options
        lasted = link.live_at is not None and now - link.live_at >= options.rebuild_max_s
        peer.num_failures = 1 if lasted else peer.num_failures + 1
        pause = options.rebuild_min_s * 2 ** min(peer.num_failures - 1, 30)
        peer.rebuild_at = now + min(pause, options.rebuild_max_s)
        # It could not be built or carried nothing, and not because the peer was gone: the next transport is tried.
        is_unfit = link.live_at is None or link.carries is False
        if is_unfit and not peer.heartbeat.silent(now) and len(peer.transports) > 1:
            peer.passed_over[link.transport] = reason
            peer.transports.rotate(-1)
            log.warn("transport_fallback", link=link.name, to=peer.transports[0], reason=reason)

    def _start_transfers(self, peer_id: str) -> None:
        """Start the peer's transfers, or fail them if the peer is refused."""
        for transfer in self.transfers.of_peer(peer_id):
            self._try_start(transfer)

    # ------------------------------------------------------------------- transfers, under the lock
    def _apply(self, transfer: ReceiveTransfer, message: _Keyed) -> None:
        if isinstance(message, CancelTransfer):
            self._fail(transfer, message.reason, tell=None, by_peer=True, handed_off=message.handed_off)
            return
        if transfer.state is not ReceiveState.RECEIVING:
            return  # before Ready the peer knows no prefix to count from; after the end no message counts
        try:
            match message:
                case Offer():
                    self._offered(transfer, message)
                case Handoff():
                    transfer.handed_off(message)
                    self._link(transfer)[1].hurry(transfer.key)
        except TransferError as error:
            self._fail(transfer, str(error), tell=Done(transfer.key, False, str(error)))
            return
        self._progressed(transfer)
        self._settle(transfer)

    def _offered(self, transfer: ReceiveTransfer, offer: Offer) -> None:
        if not transfer.offered(offer.first_page, offer.num_pages, self._clock(), offer.has_windows):
            return
        peer, link = self._link(transfer)
        for plan in peer.plans if offer.has_windows else peer.plans[:1]:
            chunks = plan.cut(offer.first_page, offer.num_pages)
            link.enqueue(transfer.key, chunks, bulk=transfer.is_bulk)

    def _link(self, transfer: ReceiveTransfer) -> tuple[SendingNode, ReceiveWorker]:
        """Where the pages of a transfer come from, and over which link: the transfer lives and dies with it."""
        peer = self._peers[transfer.peer_id]
        assert peer.link is not None, "a transfer outlived its link"
        return peer, peer.link

    def _progressed(self, transfer: ReceiveTransfer) -> None:
        now = self._clock()
        options = self._options
        transfer.deadline = now + (
            options.offer_timeout_s if transfer.has_all_offered else options.transfer_timeout_s
        )
        if transfer.complete():
            self._outbox.send(transfer.peer_id, Done(transfer.key, True))

    def _try_start(self, transfer: ReceiveTransfer) -> None:
        """Send Ready if the peer has a link, built or being built: the transfer lives and dies with it."""
        peer = self._peers.get(transfer.peer_id)
        if peer is None or transfer.state is not ReceiveState.RESERVED:
            return
        if peer.refused is not None:
            self._fail(transfer, peer.refused, tell=None)
        elif peer.link is not None:
            transfer.start(self._clock() + self._options.offer_timeout_s)
            self._outbox.send(transfer.peer_id, transfer.ready)

    def _check_deadline(self, transfer: ReceiveTransfer, now: float) -> None:
        if now < transfer.deadline:
            return
        if transfer.state is ReceiveState.RESERVED:
            reason = f"no link to sending node {transfer.peer_id} came up in time"
        elif transfer.has_all_offered:
            reason = f"no pages were offered for {self._options.offer_timeout_s:g} s"
        else:
            reason = f"no progress for {self._options.transfer_timeout_s:g} s"
        self._fail(transfer, reason, tell=Done(transfer.key, False, reason))

    def _fail(
        self,
        transfer: ReceiveTransfer,
        reason: str,
        *,
        tell: Done | CancelTransfer | None,
        by_peer: bool = False,
        handed_off: bool = False,
        corrupt: bool = False,
    ) -> None:
        if not transfer.fail(reason, by_peer=by_peer, handed_off=handed_off, corrupt=corrupt):
            return
        if tell is not None:
            self._outbox.send(transfer.peer_id, tell)
        self._settle(transfer)

    def _give_up(self, transfer: ReceiveTransfer, reason: str) -> None:
        self._fail(transfer, reason, tell=CancelTransfer(transfer.key, reason))

    def _tombstone(self, end: Received | ReceiveFailed) -> Done:
        return (
            Done(end.key, True)
            if isinstance(end, Received)
            else Done(end.key, False, end.reason, end.corrupt)
        )


def _answer_late(message: _Keyed, done: Done) -> Done | None:
    """The answer to a message about a transfer that has ended with `done`."""
    return None if isinstance(message, CancelTransfer) else done


def check_layout(ours: KVLayout, theirs: KVLayout, *, allow_mixed_numerics: bool) -> None:
    """Raise PeerMismatch, naming the first field that differs."""
    for name in KVLayout.__struct_fields__:
        if name == "numerics" and allow_mixed_numerics:
            continue
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise PeerMismatch(f"KV layouts differ in {name}: this node has {here!r}, the peer has {there!r}")
