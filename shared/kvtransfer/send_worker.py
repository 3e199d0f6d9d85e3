"""Sending on one link of the sending node: takes Grants in order, gathers pages, sends them.

The copier gathers a chunk into a slot and starts its sending; the link's data thread waits for sends to leave their
slots. So the next chunk is gathered while the last one is on its way, and nothing waits between the two.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from shared.errors import LinkError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import SENDER, Link, Op
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.staging import Envelope, Slot
from shared.protocol.transfer_messages import Grant, GrantedChunk, LinkOpen

if TYPE_CHECKING:
    from shared.kvtransfer.sender import KVSender


class SendWorker(LinkWorker):
    """Answers every Grant, since a receive is posted for each: with a void message if it came too late."""

    rank = SENDER

    def __init__(self, own: Endpoint, peer_id: str, opening: LinkOpen, side: KVSender) -> None:
        super().__init__(own, peer_id, opening, side)
        self._side = side
        self._pages = own.pages
        self._copier = own.transports.runner.new_copier(self.name)
        self._due: deque[tuple[int, GrantedChunk]] = deque()
        self._next_seq = 0
        self._serving = False
        """True while the copier works or is about to, and for good once it has failed."""
        self._sending: deque[tuple[Op, Slot]] = deque()
        """The copier appends, the data thread takes from the front."""
        self._failure: Exception | None = None
        """Why the copier has stopped; the data thread ends the link with it."""
        self._lock = threading.Lock()
        """Guards the ring and what is due: the copier takes it, other threads bring it."""

    def accept(self, grant: Grant) -> None:
        """Queue a Grant. LinkError: it makes no sense, so the two ends disagree. Under the side's lock."""
        if grant.seq < self._next_seq:
            return
        if grant.seq > self._next_seq:
            raise LinkError(f"grant {grant.seq} came where {self._next_seq} was due")
        for seq, chunk in enumerate(grant.chunks, grant.seq):
            self._check(seq, chunk)
        self._next_seq += len(grant.chunks)
        with self._lock:
            self._due.extend(enumerate(grant.chunks, grant.seq))
        self._wake_copier()

    def _move(self, link: Link, *, block: bool) -> bool:
        """Wait for the oldest send to leave its slot."""
        if self._failure is not None:
            raise self._failure
        if self._sending:
            return self._reap(block=block)
        self._wake_copier()  # Grants may have come while the link was being built
        if block:
            self._kicked.wait()
        return False

    def _drain(self, *, block: bool) -> bool:
        with self._lock:
            self._due.clear()
        self._copier.shutdown(wait=block)
        while self._sending:
            try:
                if not self._reap(block=block):
                    return False
            except LinkError:  # expected of a dead link; what matters is that the op has left
                self._give_back(self._sending.popleft()[1])
        # The traceback of a failure has the copier's slot, and this worker: a cycle that would keep its memory.
        self._failure = None
        return True

    def _check(self, seq: int, chunk: GrantedChunk) -> None:
        last_layer = chunk.first_layer + chunk.num_layers
        layout = self._own.layout
        num_full = layout.num_layers - layout.num_window_layers
        fits = 0 <= chunk.first_layer < last_layer <= layout.num_layers and chunk.num_pages > 0
        fits &= not chunk.first_layer < num_full < last_layer  # no chunk has layers of both groups
        if not fits or chunk.nbytes != self._pages.gather_nbytes(chunk.num_pages, chunk.num_layers):
            raise LinkError(f"malformed grant {seq} of {chunk.nbytes} bytes")
        if chunk.nbytes > self._ring.slot_nbytes:
            raise LinkError(f"grant of {chunk.nbytes} bytes exceeds slots of {self._ring.slot_nbytes}")

    def _wake_copier(self) -> None:
        """Start the copier, unless it works already or has nothing to do."""
        with self._lock:
            if not self._due or self._serving or self.live_at is None:
                return
            self._serving = True
        self._copier.submit(self._serve)

    # ----------------------------------------------------------------------------------- the copier
    def _serve(self) -> None:
        try:
            while (work := self._next_due()) is not None:
                self._send(*work)
                # The link's thread is not woken for every chunk, since that costs a thread switch, nor only when all
                # slots are out: slots that come home early are taken again while they are still in the cache.
                if 2 * self._ring.num_out >= self._ring.num_slots:
                    self._kicked.set()
        except Exception as error:  # kept for the data thread, which ends the link with it
            self._failure = error
        finally:
            self._kicked.set()

    def _next_due(self) -> tuple[Link, int, GrantedChunk, Slot] | None:
        with self._lock:
            slot = self._ring.take() if self._due else None
            if slot is None:
                self._serving = False
                return None
            assert self._link is not None
            return self._link, *self._due.popleft(), slot

    def _send(self, link: Link, seq: int, chunk: GrantedChunk, slot: Slot) -> None:
        try:
            header = self._gather(seq, chunk, slot)
            op = link.send(slot, chunk.nbytes, seq, header)
        except BaseException:
            with self._lock:
                self._ring.give_back(slot)
            raise
        self._sending.append((op, slot))

    def _gather(self, seq: int, granted: GrantedChunk, slot: Slot) -> bytes:
        """Fill the slot, unless the chunk is void. Returns the header of the message."""
        chunk = Chunk(granted.first_page, granted.num_pages, granted.first_layer, granted.num_layers)
        envelope, digest = Envelope(granted.key, chunk, seq), None
        page_ids = self._side.begin_gather(granted.key, chunk)
        if page_ids is not None:
            payload = slot.payload(granted.nbytes)
            layers = chunk.first_layer, chunk.num_layers
            try:
                digest = self._pages.gather(page_ids, *layers, payload, envelope.seed)
            finally:
                self._side.end_gather(granted.key, chunk, payload.numel())
        return envelope.seal(digest)

    # ------------------------------------------------------------------------------ the data thread
    def _reap(self, *, block: bool) -> bool:
        op, slot = self._sending[0]
        if not op.wait(block=block):
            return False
        self._sending.popleft()
        self._give_back(slot)
        return True

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            self._ring.give_back(slot)
        self._wake_copier()
