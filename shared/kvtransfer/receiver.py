"""KVReceiver: the pages that arrive at a node.

    open ──▶ Ready ──▶ chunks are granted, received, scattered ──▶ all pages and the Handoff ──▶ Received
The scheduler thread, which alone owns the allocator, reserves pages and opens transfers. The control thread
brings messages in. One data thread per link writes pages, each scatter between `begin_scatter` and
`end_scatter`. One lock guards all state and is never held across a scatter or a wait.

From `open` until the terminal event was polled, the pages belong to this side; afterwards nothing writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shared import log
from shared.errors import TransferError
from shared.kvtransfer.inbox import KeyedInbox
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.links import Endpoint
from shared.kvtransfer.receive_loop import ReceiveLoop
from shared.kvtransfer.receiver_peers import ReceiverPeers
from shared.kvtransfer.side import Side
from shared.kvtransfer.states import Received, ReceiveEvent, ReceiveState, ReceiveTransfer
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import (
    CancelTransfer,
    Done,
    Handoff,
    LeaseRenew,
    Offer,
    SenderToReceiver,
)

_Keyed = Offer | Handoff | CancelTransfer


class KVReceiver(Side[ReceiveTransfer, ReceiveEvent]):
    """All transfers that arrive at this node."""

    def __init__(self, own: Endpoint) -> None:
        super().__init__(own)
        self.transfers: KeyedInbox[ReceiveTransfer, _Keyed, Done] = KeyedInbox(
            own=own, apply=self._apply, answer_late=_answer_late, node="receiving node"
        )
        self.peers: ReceiverPeers = ReceiverPeers(
            own,
            self._lock,
            gate=self,
            link_begins=self._start_transfers,
            link_died=self._link_died,
            refused=self._start_transfers,
        )
        self.links = self.peers.links

    # ------------------------------------------------------------------------------ scheduler thread
    def open(
        self,
        key: ReqKey,
        peer_id: str,
        page_ids: Sequence[int],
        prefix_pages: int,
        num_known: int | None = None,
    ) -> None:
        """Take `page_ids`, reserved for sequence pages from `prefix_pages` on, and ask the peer for them.

        The peer need not be connected yet. More pages may be reserved than will come. A key is opened once. Of a
        request that moves here while it runs, the first `num_known` tokens are known; its pages are in no hurry.
        """
        with self._lock:
            transfer = ReceiveTransfer(
                key=key,
                peer_id=peer_id,
                page_ids=list(page_ids),
                prefix_pages=prefix_pages,
                num_layers=self._own.layout.num_layers,
                page_size=self._own.layout.page_size,
                deadline=self._clock() + self._options.connect_timeout_s,
                num_known=num_known,
            )
            self.transfers.open(transfer)
            if self._closed:
                self._fail(transfer, "this node is shutting down", tell=None)
                return
            self._try_start(transfer)
            self.transfers.take_parked(transfer)

    def cancel(self, key: ReqKey, reason: str) -> None:
        """Give the transfer up; ReceiveFailed follows when nothing writes its pages any more. No-op once ended."""
        with self._lock:
            transfer = self.transfers.get(key)
            if transfer is None:
                assert self.transfers.ended(key) is not None or self._closed, f"{key} was never opened"
                return
            self._fail(transfer, reason, tell=CancelTransfer(key, reason))

    def close(self) -> None:
        """Fail every transfer, end every link; returns when all threads are gone. `poll` still works."""
        with self._lock:
            self._closed = True
            self.peers.clear()  # so no link is opened any more
            workers = self.links.fail_all("the receiving node is shutting down")
            for transfer in self.transfers:
                self._fail(transfer, "this node is shutting down", tell=None)
        self.links.join(workers)

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
            self.peers.heard(peer_id, now)
            match message:
                case Offer() | Handoff() | CancelTransfer():
                    self.transfers.receive(peer_id, message, now)
                case _:
                    self.peers.handle(peer_id, message, now)

    # ----------------------------------------------------------------------- data thread: ScatterGate
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

    # --------------------------------------------------------------------------------- under the lock
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
                    self._loop(transfer).hurry(transfer.key)
        except TransferError as error:
            self._fail(transfer, str(error), tell=Done(transfer.key, False, str(error)))
            return
        self._progressed(transfer)
        self._settle(transfer)

    def _offered(self, transfer: ReceiveTransfer, offer: Offer) -> None:
        if not transfer.offered(offer.first_page, offer.num_pages, self._clock()):
            return
        chunks = self.peers.plan(transfer.peer_id).cut(offer.first_page, offer.num_pages)
        self._loop(transfer).enqueue(transfer.key, chunks, bulk=transfer.is_bulk)

    def _loop(self, transfer: ReceiveTransfer) -> ReceiveLoop:
        loop = self.links.loop(transfer.peer_id)
        assert loop is not None, "a transfer outlived its link"
        return loop

    def _progressed(self, transfer: ReceiveTransfer) -> None:
        now = self._clock()
        options = self._options
        transfer.deadline = now + (
            options.offer_timeout_s if transfer.has_all_offered else options.transfer_timeout_s
        )
        if transfer.complete():
            self._outbox.send(transfer.peer_id, Done(transfer.key, True))

    def _start_transfers(self, peer_id: str) -> None:
        """Start the peer's transfers, or fail them if the peer is refused."""
        for transfer in self.transfers.of_peer(peer_id):
            self._try_start(transfer)

    def _try_start(self, transfer: ReceiveTransfer) -> None:
        """Send Ready if the peer has a link, built or being built: the transfer lives and dies with it."""
        if transfer.state is not ReceiveState.RESERVED:
            return
        refusal = self.peers.refusal(transfer.peer_id)
        if refusal is not None:
            self._fail(transfer, refusal, tell=None)
        elif self.links.worker(transfer.peer_id) is not None:
            transfer.start(self._clock() + self._options.offer_timeout_s)
            self._outbox.send(transfer.peer_id, transfer.ready)

    def _link_died(self, peer_id: str, reason: str) -> None:
        for transfer in self.transfers.of_peer(peer_id):
            if transfer.state is ReceiveState.RECEIVING:
                text = f"link lost: {reason}"
                self._fail(transfer, text, tell=Done(transfer.key, False, text))

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

    def _settle(self, transfer: ReceiveTransfer) -> None:
        """Post the terminal event as soon as no scatter writes the pages."""
        end = transfer.take_end()
        if end is None:
            return
        done = Done(end.key, True)
        if not isinstance(end, Received):
            done = Done(end.key, False, end.reason, end.corrupt)
        self.transfers.close(transfer.key, done, self._clock())
        self._post(end)


def _answer_late(message: _Keyed, done: Done) -> Done | None:
    """The answer to a message about a transfer that has ended with `done`."""
    return None if isinstance(message, CancelTransfer) else done
