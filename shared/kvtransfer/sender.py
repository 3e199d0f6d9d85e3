"""KVSender: the pages that leave a node.

    open ──Ready──▶ offer, offer, ... ──▶ handoff ──Done──▶ SendEnded
The scheduler thread opens transfers, offers pages as they are computed, and polls for events. The control
thread brings messages in. One data thread per link reads pages, each gather between `begin_gather` and
`end_gather`. One lock guards all state and is never held across a gather or a wait.

From `offer` until SendEnded was polled, the caller keeps the offered pages allocated and unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.kvtransfer.inbox import KeyedInbox
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.links import Endpoint
from shared.kvtransfer.sender_peers import SenderPeers
from shared.kvtransfer.side import Side
from shared.kvtransfer.states import ReadyOverdue, SendEnded, SendEvent, SendState, SendTransfer
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import (
    CancelTransfer,
    Done,
    Handoff,
    LeaseRenew,
    Offer,
    PeerLeft,
    Ready,
    ReceiverToSender,
)

_Keyed = Ready | Done | CancelTransfer


class KVSender(Side[SendTransfer, SendEvent]):
    """All transfers that leave this node."""

    def __init__(self, own: Endpoint) -> None:
        super().__init__(own)
        self.transfers: KeyedInbox[SendTransfer, _Keyed, CancelTransfer] = KeyedInbox(
            own=own, apply=self._apply, answer_late=_answer_late, node="sending node"
        )
        self.peers: SenderPeers = SenderPeers(own, self._lock, gate=self, fail_transfers=self._fail_transfers)
        self.links = self.peers.links

    # ------------------------------------------------------------------------------ scheduler thread
    def open(self, key: ReqKey, peer_id: str) -> None:
        """Begin a transfer to the node `peer_id`, which will ask for the pages of `key`. A key is opened once."""
        with self._lock:
            now = self._clock()
            transfer = SendTransfer(
                key, peer_id, self._own.layout.num_layers, now, now + self._options.ready_timeout_s
            )
            self.transfers.open(transfer)
            if self._closed:
                self._end(transfer, "this node is shutting down", tell_peer=False)
                return
            refused = self.peers.refusal(peer_id)
            if refused is not None:
                self._end(transfer, refused, tell_peer=False)
            self.transfers.take_parked(transfer)

    def offer(self, key: ReqKey, page_ids: Sequence[int]) -> None:
        """Offer the next pages of the sequence, which are computed and held. No-op once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is None or not page_ids:
                return
            first_page = transfer.offer(list(page_ids), self._clock())
            self._outbox.send(transfer.peer_id, Offer(key, first_page, len(page_ids)))

    def handoff(self, key: ReqKey, handoff: Handoff) -> None:
        """Send the record that lets the receiving node go on; every page is offered. No-op once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is None:
                return
            assert handoff.key == key
            transfer.handoff(handoff.total_pages, self._clock() + self._options.lease_s)
            self._outbox.send(transfer.peer_id, handoff)

    def cancel(self, key: ReqKey, reason: str) -> None:
        """Give the transfer up; SendEnded follows when its pages are not read any more. No-op once ended."""
        with self._lock:
            transfer = self._living(key)
            if transfer is not None:
                self._end(transfer, reason, tell_peer=True)

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

    def close(self) -> None:
        """Fail every transfer, end every link; returns when all threads are gone. `poll` still works."""
        with self._lock:
            self._closed = True
            workers = self.links.fail_all("the sending node is shutting down")
            for transfer in self.transfers:
                self._end(transfer, "this node is shutting down", tell_peer=True)
            for peer_id in self.peers.ids:
                # A peer that is not told opens a new link, and waits until this node counts as silent.
                self._outbox.send(peer_id, PeerLeft())
            self.peers.clear()
        self.links.join(workers)

    # -------------------------------------------------------------------------------- control thread
    def on_connected(self, peer_id: str) -> None:
        """Meet a receiving node whose control connection is up, for the first time or again."""
        with self._lock:
            if not self._closed:
                self.on_disconnected(peer_id, "the control connection was replaced")
                self.peers.connected(peer_id)

    def on_disconnected(self, peer_id: str, reason: str) -> None:
        """Fail every transfer to a peer whose control connection is gone."""
        with self._lock:
            if self.peers.disconnected(peer_id, reason):
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
            if self._closed or not self.peers.heard(peer_id, now):
                return
            match message:
                case Ready() | Done() | CancelTransfer():
                    self.transfers.receive(peer_id, message, now)
                case LeaseRenew():
                    self._renewed(peer_id, message)
                case _:
                    self.peers.handle(peer_id, message)

    # ------------------------------------------------------------------------ data thread: GatherGate
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

    # --------------------------------------------------------------------------------- under the lock
    def _living(self, key: ReqKey) -> SendTransfer | None:
        """The transfer, or None when it has ended. A key that was never opened is the caller's mistake."""
        transfer = self.transfers.get(key)
        if transfer is None:
            assert self.transfers.ended(key) is not None or self._closed, f"{key} was never opened"
            return None
        return None if transfer.state is SendState.ENDED else transfer

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
        if transfer.deadline is None or transfer.state is SendState.ENDED:
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
            transfer.peer_id not in self.peers and now - transfer.opened_at >= self._options.connect_timeout_s
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

    def _settle(self, transfer: SendTransfer) -> None:
        """Post the terminal event as soon as no gather reads the pages."""
        end: SendEnded | None = transfer.take_end()
        if end is not None:
            cancel = CancelTransfer(end.key, end.reason or "done", end.handed_off)
            self.transfers.close(transfer.key, cancel, self._clock())
            self._post(end)


def _answer_late(message: _Keyed, cancel: CancelTransfer) -> CancelTransfer | None:
    """The answer to a message about a transfer that has ended as `cancel` says."""
    return cancel if isinstance(message, Ready) else None
