"""Requests that wait for pages and a slot here, before their prefill may begin elsewhere."""

from __future__ import annotations

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.kvtransfer.receiver import ReceiveSide
from shared.protocol.messages import NodeRef, ReqKey
from shared.scheduling.req import Req
from shared.timeline import ReqStage


class PreallocQueue:
    """First come first served. What is reserved here is the backpressure on the prefill fleet."""

    def __init__(self, ledger: KVLedger, receiver: ReceiveSide, options: ScheduleOptions) -> None:
        self._ledger = ledger
        self._receiver = receiver
        self._headroom = options.num_reserved_decode_tokens
        self._queue: list[tuple[Req, NodeRef]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, req: Req, prefill: NodeRef) -> None:
        """`req` will be prefilled on `prefill`, once there is room for it here."""
        self._queue.append((req, prefill))

    def remove(self, key: ReqKey) -> None:
        """Forget a request that ended; it holds nothing yet."""
        self._queue = [(req, prefill) for req, prefill in self._queue if req.key != key]

    def reserve(self, num_admitted: int) -> list[Req]:
        """Reserve rows and pages in order of arrival until one does not fit; returns the requests now in transfer.

        Room for a few more tokens of each of the `num_admitted` requests that hold KV here stays free, so that an
        arrival does not force a retraction at once; the only request of a node needs no such room.
        """
        reserved: list[Req] = []
        while self._queue:
            req, prefill = self._queue[0]
            others = num_admitted + len(reserved)
            headroom = self._headroom * (others + 1) if others else 0
            if not self._reserve(req, headroom):
                break
            del self._queue[0]
            assert req.kv is not None
            prefix_pages = req.kv.num_tree_pages
            pages = self._ledger.rows.read(req.kv.row, prefix_pages, req.kv.num_pages)
            req.timeline.move_to(ReqStage.TRANSFERRING)
            self._receiver.open(req.key, prefill.incarnation, pages, prefix_pages)
            reserved.append(req)
        return reserved

    def _reserve(self, req: Req, headroom_tokens: int) -> bool:
        ledger = self._ledger
        if ledger.rows.num_free == 0:
            return False
        # Unlike a local prefill, a transfer may find the whole prompt cached: its last token is computed elsewhere.
        match = ledger.radix_cache.match_prefix(req.ids, req.extra_key)
        with ledger.tentative(match, req.extra_key) as admission:
            kv = admission.kv
            assert kv is not None, "a row was free a moment ago"
            missing = ledger.pages_for(len(req.ids)) - kv.num_pages
            if missing + ledger.pages_for(headroom_tokens) > ledger.num_available_pages:
                return False
            if not ledger.grow_for_arrival(kv, len(req.ids)):
                return False
            req.kv = admission.keep()
        req.cached_tokens = kv.kv_committed_len
        return True
