"""KVSender: the pages that leave a node.

    open ──Ready──▶ offer, offer, ... ──▶ handoff ──Done──▶ SendEnded
The scheduler thread opens transfers, offers pages as they are computed, and polls for events. The control
thread brings messages in. One data thread per link reads pages, each gather between `begin_gather` and
`end_gather`. One lock guards all state and is never held across a gather or a wait.

From `offer` until SendEnded was polled, the caller keeps the offered pages allocated and unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared import log
from shared.errors import LinkError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.send_worker import SendWorker
from shared.kvtransfer.side import KeyedInbox, Peer, Side
from shared.kvtransfer.staging import Chunk
from shared.kvtransfer.states import ReadyOverdue, SendEnded, SendEvent, SendState, SendTransfer
from shared.protocol.messages import PROTOCOL_VERSION, Refused, ReqKey
from shared.protocol.transfer_messages import (
    CancelTransfer,
    Done,
    Grant,
    Handoff,
    LeaseRenew,
    LinkLost,
    LinkOpen,
    Offer,
    PeerHello,
    PeerLeft,
    PeerPing,
    PeerPong,
    Ready,
    ReceiverToSender,
    StoreSet,
)

_Keyed = Ready | Done | CancelTransfer
MAX_LINK_NAMES = 1024


@dataclass(slots=True, kw_only=True)
class ReceivingNode(Peer[SendWorker]):
    """A node that this one is connected to, and sends pages to."""

    said_hello_at: float
    """When this node last introduced itself to the peer, or lost the link."""


class KVSender(Side[SendTransfer, SendEvent, ReceivingNode]):
    """All transfers that leave this node.

    This node introduces itself to a receiving node that it is connected to (PeerHello). The receiving node answers
    with LinkOpen, upon which both build the link, or with Refused.
    """

    called = "sending node"

    def __init__(self, own: Endpoint) -> None:
        super().__init__(own)
        self.transfers: KeyedInbox[SendTransfer, _Keyed, CancelTransfer] = KeyedInbox(
            own=own, apply=self._apply, answer_late=_answer_late, called=self.called
        )
        self._link_names: deque[str] = deque(maxlen=MAX_LINK_NAMES)
        """Of links that were begun, of which none is built twice."""

    # ------------------------------------------------------------------------------ scheduler thread
    def open(self, key: ReqKey, peer_id: str) -> None:
        """Begin a transfer to the node `peer_id`, which will ask for the pages of `key`. A key is opened once."""
        with self._lock:
            now = self._clock()
            layout, deadline = self._own.layout, now + self._options.ready_timeout_s
            transfer = SendTransfer(
                key, peer_id, layout.num_layers, now, deadline, num_window_layers=layout.num_window_layers
            )
            self.transfers.open(transfer)
            if self._closed:
                self._end(transfer, "this node is shutting down", tell_peer=False)
                return
            peer = self._peers.get(peer_id)
            if peer is not None and peer.refused is not None:
                self._end(transfer, peer.refused, tell_peer=False)
            self.transfers.take_parked(transfer)

    def offer(self, key: ReqKey, page_ids: Sequence[int], window_ids: Sequence[int] = ()) -> None:
        """Offer the next pages of the sequence, which are computed and held. No-op once ended.

        `window_ids` are the window page of each, held as well. Without them the layers with windows do not come.
        """
        with self._lock:
            transfer = self._living(key)
            if transfer is None or not page_ids:
                return
            first_page = transfer.offer(list(page_ids), self._clock(), list(window_ids))
            self._outbox.send(transfer.peer_id, Offer(key, first_page, len(page_ids), bool(window_ids)))

    def handoff(self, key: ReqKey, handoff: Handoff) -> None:
        """Send the record that lets the receiving node go on; every page is offered. No-op once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is None:
                return
            assert handoff.key == key
            transfer.handoff(handoff.total_pages, self._clock() + self._options.lease_s)
            self._outbox.send(transfer.peer_id, handoff)

    def num_pages_sent(self, key: ReqKey) -> tuple[int, int]:
        """How many pages have been read and are on their way, and how many were offered. (0, 1) once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is None:
                return 0, 1
            return transfer.num_pages_sent, len(transfer.page_ids)

    def is_used_by(self, peer_id: str) -> bool:
        """Whether there is a transfer to this peer."""
        with self._lock:
            return bool(self.transfers.of_peer(peer_id))

    # -------------------------------------------------------------------------------- control thread
    def on_connected(self, peer_id: str) -> None:
        """Meet a receiving node whose control connection is up, for the first time or again."""
        with self._lock:
            if not self._closed:
                self.on_disconnected(peer_id, "the control connection was replaced")
                peer = ReceivingNode(
                    peer_id=peer_id, heartbeat=self._heartbeat(), said_hello_at=self._clock()
                )
                self._meet(peer)
                self._say_hello(peer)

    def on_disconnected(self, peer_id: str, reason: str) -> None:
        """Fail every transfer to a peer whose control connection is gone."""
        with self._lock:
            if self._forget(peer_id, reason, tell_peer=False):
                self._fail_transfers(peer_id, reason, waiting_too=True, tell_peer=False)
                self.transfers.drop_peer(peer_id)

    def leave(self, peer_id: str, reason: str) -> None:
        """Tell a peer that this node closes their connection, and end their link."""
        with self._lock:
            self._outbox.send(peer_id, PeerLeft())
            self.on_disconnected(peer_id, reason)

    def on_message(self, peer_id: str, message: ReceiverToSender) -> None:
        """Handle a message of a receiving node. Never blocks."""
        with self._lock:
            now = self._clock()
            if self._closed or (peer := self._heard(peer_id, now)) is None:
                return
            match message:
                case Ready() | Done() | CancelTransfer():
                    self.transfers.receive(peer_id, message, now)
                case LeaseRenew():
                    self._renewed(peer_id, message)
                case Grant():
                    self._granted(peer, message)
                case LinkOpen():
                    self._open_link(peer, message)
                case Refused():
                    log.warn("peer_refused_us", peer=peer_id, reason=message.reason)
                    peer.refused = message.reason
                    self.end_link_of(peer_id, message.reason, tell_peer=False)
                    self._fail_transfers(peer_id, message.reason, waiting_too=True, tell_peer=False)
                case StoreSet() | LinkLost() | PeerPing() | PeerPong():
                    self._take(peer, message)

    # ------------------------------------------------------------------------------------ data thread
    def begin_gather(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        """The pages of `chunk`, which stay as they are until `end_gather`; None: the chunk is void."""
        with self._lock:
            transfer = self.transfers.get(key)
            return None if transfer is None else transfer.begin_gather(chunk)

    def end_gather(self, key: ReqKey, chunk: Chunk, nbytes: int) -> None:
        """Count a gather, whose pages have been read."""
        with self._lock:
            transfer = self.transfers.get(key)
            assert transfer is not None, "a transfer is closed only after its last gather"
            transfer.end_gather(chunk, nbytes, self._clock())
            self._settle(transfer)

    # ----------------------------------------------------------------------- peers, under the lock
    def _check_peer(self, peer: ReceivingNode, silence: str | None, now: float) -> None:
        """Fail what a silent one has, and introduce this node anew to one that has had no link for long.

        A silent one gets a PeerHello too: it may have forgotten this node, and answers no pings of unknown nodes.
        """
        if silence is not None:
            self._fail_transfers(peer.peer_id, silence, waiting_too=True, tell_peer=True)
        unlinked = peer.link is None and peer.refused is None
        if unlinked and now - peer.said_hello_at >= self._options.hello_retry_s:
            peer.said_hello_at = now
            self._say_hello(peer)

    def _say_hello(self, peer: ReceivingNode) -> None:
        own, transports = self._own, self._own.transports
        offered = tuple(transports.factories)
        place, slot_nbytes = transports.place, transports.slot_nbytes
        hello = PeerHello(own.node, own.layout, offered, place, slot_nbytes, PROTOCOL_VERSION)
        self._outbox.send(peer.peer_id, hello)

    def _granted(self, peer: ReceivingNode, grant: Grant) -> None:
        if peer.link is None or peer.link.name != grant.link:
            self._outbox.send(peer.peer_id, LinkLost(grant.link, "there is no such link here"))
            return
        try:
            peer.link.accept(grant)
        except LinkError as error:
            self.end_link(peer.link, str(error))

    def _open_link(self, peer: ReceivingNode, opening: LinkOpen) -> None:
        if opening.link in self._link_names:
            return
        if opening.transport not in self._own.transports.factories:
            reason = f"kv_transfer: {opening.transport} was not offered"
            self._outbox.send(peer.peer_id, LinkLost(opening.link, reason))
            return
        self.end_link_of(peer.peer_id, "replaced by another incarnation")
        # A Ready that came before this LinkOpen was for the old link.
        self._fail_transfers(peer.peer_id, "the link was replaced", waiting_too=False, tell_peer=True)
        peer.refused = None
        peer.said_hello_at = self._clock()
        self._link_names.append(opening.link)
        self._begin(peer, SendWorker(self._own, peer.peer_id, opening, self))

    def _link_died(self, link: LinkWorker, peer: ReceivingNode | None, reason: str) -> None:
        if peer is not None:
            peer.said_hello_at = self._clock()
        self._fail_transfers(link.peer_id, f"link lost: {reason}", waiting_too=False, tell_peer=True)

    def _leave(self, peer_ids: Sequence[str]) -> None:
        """A peer that is not told opens a new link, and waits until this node counts as silent."""
        for peer_id in peer_ids:
            self._outbox.send(peer_id, PeerLeft())

    # ------------------------------------------------------------------- transfers, under the lock
    def _apply(self, transfer: SendTransfer, message: _Keyed) -> None:
        match message:
            case Ready():
                if transfer.ready(message.prefix_pages):
                    self._post(message)
            case Done(ok=True) if transfer.state is SendState.HANDED_OFF:
                self._end(transfer, "", tell_peer=False, ok=True)
            case Done():
                reason = message.reason or "the receiving node ended the transfer before the handoff"
                self._end(transfer, reason, tell_peer=False, corrupt=message.corrupt)
            case CancelTransfer():
                self._end(transfer, f"cancelled by the receiving node: {message.reason}", tell_peer=False)

    def _renewed(self, peer_id: str, message: LeaseRenew) -> None:
        lease_until = self._clock() + self._options.lease_s
        for key in message.keys:
            transfer = self.transfers.get(key)
            if transfer is not None:
                if transfer.peer_id == peer_id:
                    transfer.renew(lease_until)
            elif (cancel := self.transfers.ended(key)) is not None:
                self._outbox.send(peer_id, cancel)

    def _fail_transfers(self, peer_id: str, reason: str, *, waiting_too: bool, tell_peer: bool) -> None:
        for transfer in self.transfers.of_peer(peer_id):
            if waiting_too or transfer.state is not SendState.WAITING:
                self._end(transfer, reason, tell_peer=tell_peer)

    def _check_deadline(self, transfer: SendTransfer, now: float) -> None:
        if transfer.deadline is None or transfer.ended:
            return
        if now >= transfer.deadline:
            waiting = transfer.state is SendState.WAITING
            reason = (
                "the receiving node reserved no pages in time"
                if waiting
                else "the lease ended without renewal"
            )
            self._end(transfer, reason, tell_peer=True)
        elif (
            transfer.peer_id not in self._peers
            and now - transfer.opened_at >= self._options.connect_timeout_s
        ):
            self._end(transfer, f"no connection to receiving node {transfer.peer_id}", tell_peer=False)
        elif transfer.becomes_overdue(now):
            self._post(ReadyOverdue(transfer.key))

    def _end(
        self,
        transfer: SendTransfer,
        reason: str,
        *,
        tell_peer: bool,
        ok: bool = False,
        corrupt: bool = False,
    ) -> None:
        cancel = CancelTransfer(transfer.key, reason, transfer.state is SendState.HANDED_OFF)
        if not transfer.end(ok=ok, reason=reason, now=self._clock(), corrupt=corrupt):
            return
        if tell_peer:
            self._outbox.send(transfer.peer_id, cancel)
        self._settle(transfer)

    def _give_up(self, transfer: SendTransfer, reason: str) -> None:
        self._end(transfer, reason, tell_peer=True)

    def _tombstone(self, end: SendEnded) -> CancelTransfer:
        return CancelTransfer(end.key, end.reason or "done", end.handed_off)


def _answer_late(message: _Keyed, cancel: CancelTransfer) -> CancelTransfer | None:
    """The answer to a message about a transfer that has ended as `cancel` says."""
    return cancel if isinstance(message, Ready) else None
