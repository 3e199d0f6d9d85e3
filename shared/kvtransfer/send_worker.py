"""Sending on one link of the sending node: takes Grants in order, gathers pages, sends them.

The copier gathers a chunk into a slot and starts its sending; the link's data thread waits for sends to leave their
slots. So the next chunk is gathered while the last one is on its way, and nothing waits between the two. A GPU gets
the gather of the next chunk before the one under way is waited for, so it has work while the host sends.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.device_streams import GatherUnderWay
from shared.errors import LinkError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link import SENDER, Link, Op
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.staging import Chunk, Envelope, Slot
from shared.protocol.transfer_messages import Grant, GrantedChunk, LinkOpen

if TYPE_CHECKING:
    from shared.kvtransfer.sender import KVSender


@dataclass(slots=True)
class _Gather:
    """A granted chunk on its way into a slot."""

    envelope: Envelope
    slot: Slot
    nbytes: int
    result: int | GatherUnderWay | None = None
    """The digest, or a GPU is at it; None: the chunk is void."""

    @property
    def is_under_way(self) -> bool:
        return self.result is not None and not isinstance(self.result, int)


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
        self._gathering: deque[_Gather] = deque()
        """The copier's, in order: at most one that is under way and the next."""
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
            while (due := self._next_due()) is not None or self._gathering:
                if due is not None:
                    self._gathering.append(self._begin(*due))
                if due is None or len(self._gathering) > 1 or not self._gathering[0].is_under_way:
                    self._send(self._gathering.popleft())
                # The link's thread is not woken for every chunk, since that costs a thread switch, nor only when all
                # slots are out: slots that come home early are taken again while they are still in the cache.
                if 2 * self._ring.num_out >= self._ring.num_slots:
                    self._kicked.set()
        except Exception as error:  # kept for the data thread, which ends the link with it
            self._failure = error
            while self._gathering:
                self._drop(self._gathering.popleft())
        finally:
            self._kicked.set()

    def _next_due(self) -> tuple[int, GrantedChunk, Slot] | None:
        with self._lock:
            slot = self._ring.take() if self._due else None
            if slot is None:
                self._serving = bool(self._gathering)
                return None
            return *self._due.popleft(), slot

    def _begin(self, seq: int, granted: GrantedChunk, slot: Slot) -> _Gather:
        """Fill the slot, or have a GPU fill it, unless the chunk is void."""
        chunk = Chunk(granted.first_page, granted.num_pages, granted.first_layer, granted.num_layers)
        gather = _Gather(Envelope(granted.key, chunk, seq), slot, granted.nbytes)
        page_ids = self._side.begin_gather(granted.key, chunk)
        if page_ids is not None:
            payload, layers = slot.payload(granted.nbytes), (chunk.first_layer, chunk.num_layers)
            try:
                gather.result = self._pages.gather(page_ids, *layers, payload, gather.envelope.seed)
            except BaseException:
                gather.result = 0
                self._drop(gather)
                raise
        return gather

    def _send(self, gather: _Gather) -> None:
        assert self._link is not None
        try:
            header = gather.envelope.seal(self._ended(gather))
            op = self._link.send(gather.slot, gather.nbytes, gather.envelope.seq, header)
        except BaseException:
            with self._lock:
                self._ring.give_back(gather.slot)
            raise
        self._sending.append((op, gather.slot))

    def _ended(self, gather: _Gather) -> int | None:
        """Wait until the pages have been read. Returns their digest, or None where there are none."""
        result, envelope = gather.result, gather.envelope
        if result is None:
            return None
        try:
            return result if isinstance(result, int) else result.wait()
        finally:
            self._side.end_gather(envelope.key, envelope.chunk, gather.nbytes)

    def _drop(self, gather: _Gather) -> None:
        """Give back pages and slot of a chunk that is not sent, since another failure ends the link."""
        with suppress(Exception):  # that failure is kept, and is most likely the cause of this one
            self._ended(gather)
        with self._lock:
            self._ring.give_back(gather.slot)

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
