"""The data thread of a link on the receiving node: grants chunks, takes them in, scatters them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import LinkError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link import RECEIVER, Arrival, Link
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.staging import Chunk, Envelope
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Grant, GrantedChunk, LinkOpen

if TYPE_CHECKING:
    from shared.kvtransfer.receiver import KVReceiver


@dataclass(frozen=True, slots=True)
class _Granted:
    arrival: Arrival
    envelope: Envelope
    nbytes: int


class ReceiveWorker(LinkWorker):
    """Grants chunks in the order in which their pages were offered, as many at a time as the link takes.

    Bulk chunks, whose request still runs on the sending node, come last: after all others of this link, and one at a
    time while chunks that are none are on their way over any link of this node.
    """

    rank = RECEIVER

    def __init__(self, own: Endpoint, peer_id: str, opening: LinkOpen, side: KVReceiver) -> None:
        super().__init__(own, peer_id, opening, side)
        self._side = side
        self._pages = own.pages
        self._queue: deque[tuple[ReqKey, Chunk]] = deque()
        self._bulk: deque[tuple[ReqKey, Chunk]] = deque()
        self._lock = threading.Lock()
        """Guards both queues."""
        self._next_seq = 0
        self._granted: deque[_Granted] = deque()

    def enqueue(self, key: ReqKey, chunks: Iterable[Chunk], *, bulk: bool) -> None:
        """Queue chunks that the peer has computed and holds. Any thread."""
        with self._lock:
            (self._bulk if bulk else self._queue).extend((key, chunk) for chunk in chunks)
        self._kicked.set()

    def hurry(self, key: ReqKey) -> None:
        """The chunks of `key` are bulk no longer: its request waits for them. Any thread."""
        with self._lock:
            self._queue.extend(item for item in self._bulk if item[0] == key)
            self._bulk = deque(item for item in self._bulk if item[0] != key)
        self._kicked.set()

    def _move(self, link: Link, *, block: bool) -> bool:
        """Grant what there are slots for, then take in the oldest granted chunk."""
        granted = self._grant(link)
        if self._granted:
            return self._take_in(block=block) or granted
        if block:
            self._kicked.wait()
        return granted

    def _drain(self, *, block: bool) -> bool:
        """Drop what has arrived, whose transfers have failed."""
        while self._granted:
            arrival = self._granted[0].arrival
            with suppress(LinkError):  # expected of a dead link; what matters is that the op has left
                if not arrival.wait(block=block):
                    return False
            with suppress(LinkError):
                arrival.release()
            self._granted.popleft()
        return True

    def _grant(self, link: Link) -> bool:
        # A Grant of many chunks costs hardly more than a Grant of one, so the next one waits until half are taken in.
        if len(self._granted) > link.max_arrivals // 2:
            return False
        seq, chunks = self._next_seq, []
        while len(self._granted) < link.max_arrivals and (wanted := self._next_wanted()) is not None:
            chunks.append(self._post_receive(link, *wanted))
        if chunks:
            # Behind the receives: a chunk that arrived before its receive is posted would take another chunk's place.
            self._own.outbox.send(self.peer_id, Grant(self.name, seq, tuple(chunks)))
        return bool(chunks)

    def _next_wanted(self) -> tuple[ReqKey, Chunk] | None:
        while (item := self._next_queued()) is not None:
            if self._side.wants(item[0]):
                return item
        return None

    def _next_queued(self) -> tuple[ReqKey, Chunk] | None:
        bulk_may_go = not (self._bulk and self._granted and self._side.is_hurried())
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            return self._bulk.popleft() if self._bulk and bulk_may_go else None

    def _post_receive(self, link: Link, key: ReqKey, chunk: Chunk) -> GrantedChunk:
        nbytes = self._pages.gather_nbytes(chunk.num_pages, chunk.num_layers)
        envelope = Envelope(key, chunk, self._next_seq)
        self.carries = bool(self.carries)
        self._granted.append(_Granted(link.recv(nbytes, self._next_seq), envelope, nbytes))
        self._next_seq += 1
        return GrantedChunk(
            key, chunk.first_page, chunk.num_pages, chunk.first_layer, chunk.num_layers, nbytes
        )

    def _take_in(self, *, block: bool) -> bool:
        granted = self._granted[0]
        if not granted.arrival.wait(block=block):
            return False
        try:
            self._scatter(granted)
        finally:
            self._granted.popleft()
            granted.arrival.release()
        return True

    def _scatter(self, granted: _Granted) -> None:
        envelope, arrival = granted.envelope, granted.arrival
        digest, chunk = envelope.open(arrival.header), envelope.chunk
        if digest is None:
            # A CancelTransfer comes too. Only that says whether the Handoff, which this chunk may overtake, was sent.
            return
        page_ids = self._side.begin_scatter(envelope.key, chunk)
        if page_ids is None:
            return
        try:
            payload, layers = arrival.slot.payload(granted.nbytes), (chunk.first_layer, chunk.num_layers)
            is_intact = self._pages.scatter(page_ids, *layers, payload, envelope.seed) == digest
            if not is_intact:
                self._side.refused(envelope.key, f"chunk {envelope.seq} arrived corrupt", corrupt=True)
        except BaseException:
            self._side.refused(envelope.key, "its pages could not be written")
            raise
        finally:
            self._side.end_scatter(envelope.key, chunk, granted.nbytes)
        if not is_intact and not self.carries:
            raise LinkError("its first chunk arrived corrupt")
        self.carries = True
