"""The data thread of a link on the prefill node: takes Grants in order, gathers pages, sends them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from shared.errors import LinkError
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


class SendLoop:
    """Serves every Grant, since a receive is posted for each: a Grant that came too late is answered void."""

    def __init__(self, *, ring: SlotRing, pages: PageStore, num_layers: int, gate: GatherGate) -> None:
        self._ring = ring
        self._pages = pages
        self._num_layers = num_layers
        self._gate = gate
        self._grants: deque[Grant] = deque()
        self._next_seq = 0
        self._kicked = threading.Event()
        self._sending: deque[tuple[Op, Slot]] = deque()

    @property
    def num_slots_out(self) -> int:
        """Slots that sends under way still read."""
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
        self._grants.append(grant)
        self.kick()

    def kick(self) -> None:
        """Look for work again. Any thread."""
        self._kicked.set()

    def step(self, link: Link, *, block: bool) -> bool:
        """Send the next granted chunk, or wait for the oldest send to leave its slot."""
        self._kicked.clear()
        if self._grants and (slot := self._ring.take()) is not None:
            grant = self._grants.popleft()
            try:
                op = self._send(link, grant, slot)
            except BaseException:
                self._ring.give_back(slot)
                raise
            self._sending.append((op, slot))
            return True
        if self._sending:
            return self._reap(block=block)
        if block:
            self._kicked.wait()
        return False

    def drain(self, *, block: bool) -> bool:
        """See LinkLoop."""
        while self._sending:
            try:
                if not self._reap(block=block):
                    return False
            except LinkError:  # expected of a dead link; what matters is that the op has left
                _, slot = self._sending.popleft()
                self._ring.give_back(slot)
        return True

    def _send(self, link: Link, grant: Grant, slot: Slot) -> Op:
        chunk = Chunk(grant.first_page, grant.num_pages, grant.first_layer, grant.num_layers)
        page_ids = self._gate.begin_gather(grant.key, chunk)
        if page_ids is not None:
            payload = slot.payload(grant.nbytes)
            try:
                self._pages.gather(page_ids, chunk.first_layer, chunk.num_layers, payload)
            finally:
                self._gate.end_gather(grant.key, payload.numel())
        slot.seal(Envelope(grant.key, chunk, grant.seq), grant.nbytes, void=page_ids is None)
        return link.send(slot.message(grant.nbytes), grant.seq)

    def _reap(self, *, block: bool) -> bool:
        op, slot = self._sending[0]
        if not op.wait(block=block):
            return False
        self._sending.popleft()
        self._ring.give_back(slot)
        return True
