"""The data thread of a link on the prefill node: takes Grants in order, has pages gathered, sends them.

While one chunk is being sent, the copier already gathers the next into another slot.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from shared.errors import LinkError
from shared.kvtransfer.copier import Copier
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import Link, Op
from shared.kvtransfer.page_store import PageStore
from shared.kvtransfer.staging import HEADER_NBYTES, Envelope, Slot, SlotRing
from shared.protocol.messages import Grant, ReqKey


class GatherGate(Protocol):
    """Guards the pages of transfers while they are read; implemented by SendSide."""

    def begin_gather(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        """Pages to read now, or None: the chunk is void."""
        ...

    def end_gather(self, key: ReqKey, nbytes: int) -> None:
        """The pages have been read."""
        ...


@dataclass(frozen=True, slots=True)
class _Gathered:
    slot: Slot
    grant: Grant
    failure: Exception | None


class SendLoop:
    """Serves every Grant, since a receive is posted for each: a Grant that came too late is answered void."""

    def __init__(
        self, *, ring: SlotRing, pages: PageStore, num_layers: int, gate: GatherGate, copier: Copier
    ) -> None:
        self._ring = ring
        self._copier = copier
        self._pages = pages
        self._num_layers = num_layers
        self._gate = gate
        self._grants: deque[Grant] = deque()
        self._next_seq = 0
        self._kicked = threading.Event()
        self._gathered: deque[_Gathered] = deque()
        self._sending: deque[tuple[Op, Slot]] = deque()
        self._lock = threading.Lock()
        """Guards the ring and the grants: the copier takes them, other threads bring them."""

    @property
    def num_slots_out(self) -> int:
        """Slots that are being filled, or that sends under way still read."""
        return self._ring.num_out

    def accept(self, grant: Grant) -> None:
        """Queue a Grant. LinkError: it makes no sense, so the two ends disagree. Under the side's lock."""
        if grant.seq < self._next_seq:
            return
        if grant.seq > self._next_seq:
            raise LinkError(f"grant {grant.seq} came where {self._next_seq} was due")
        last_layer = grant.first_layer + grant.num_layers
        fits = 0 <= grant.first_layer < last_layer <= self._num_layers and grant.num_pages > 0
        if not fits or grant.nbytes != HEADER_NBYTES + self._pages.gather_nbytes(
            grant.num_pages, grant.num_layers
        ):
            raise LinkError(f"malformed grant {grant.seq} of {grant.nbytes} bytes")
        if grant.nbytes > self._ring.message_nbytes:
            raise LinkError(f"grant of {grant.nbytes} bytes exceeds slots of {self._ring.message_nbytes}")
        self._next_seq += 1
        with self._lock:
            self._grants.append(grant)
        self._copier.submit(self._gather_granted)

    def kick(self) -> None:
        """Look for work again. Any thread."""
        self._kicked.set()

    def step(self, link: Link, *, block: bool) -> bool:
        """Send the next gathered chunk, or wait for the oldest send to leave its slot."""
        self._kicked.clear()
        if self._gathered:
            self._send(link, self._gathered[0])
            return True
        if self._sending:
            return self._reap(block=block)
        if block:
            self._kicked.wait()
        return False

    def drain(self, *, block: bool) -> bool:
        """See LinkLoop."""
        with self._lock:
            self._grants.clear()
        self._copier.shutdown(wait=block)
        while self._gathered:
            self._give_back(self._gathered.popleft().slot)
        while self._sending:
            try:
                if not self._reap(block=block):
                    return False
            except LinkError:  # expected of a dead link; what matters is that the op has left
                self._give_back(self._sending.popleft()[1])
        return True

    # ----------------------------------------------------------------------------------- the copier
    def _gather_granted(self) -> None:
        while (work := self._next_gather()) is not None:
            grant, slot = work
            try:
                self._gather(grant, slot)
                failure = None
            except Exception as error:  # kept for the link's thread, which ends the link with it
                failure = error
            self._gathered.append(_Gathered(slot, grant, failure))
            self.kick()

    def _next_gather(self) -> tuple[Grant, Slot] | None:
        with self._lock:
            if not self._grants or (slot := self._ring.take()) is None:
                return None
            return self._grants.popleft(), slot

    def _gather(self, grant: Grant, slot: Slot) -> None:
        chunk = Chunk(grant.first_page, grant.num_pages, grant.first_layer, grant.num_layers)
        page_ids = self._gate.begin_gather(grant.key, chunk)
        if page_ids is not None:
            payload = slot.payload(grant.nbytes)
            try:
                self._pages.gather(page_ids, chunk.first_layer, chunk.num_layers, payload)
            finally:
                self._gate.end_gather(grant.key, payload.numel())
        slot.seal(Envelope(grant.key, chunk, grant.seq), grant.nbytes, void=page_ids is None)

    # ----------------------------------------------------------------------------- the link's thread
    def _send(self, link: Link, gathered: _Gathered) -> None:
        if gathered.failure is not None:
            raise gathered.failure
        op = link.send(gathered.slot.message(gathered.grant.nbytes), gathered.grant.seq)
        self._gathered.popleft()
        self._sending.append((op, gathered.slot))

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
            waiting = bool(self._grants)
        if waiting:
            self._copier.submit(self._gather_granted)
