"""Requests that wait for pages and a slot here, before their prefill may begin elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.kvtransfer.receiver import ReceiveSide
from shared.protocol.messages import NodeRef
from shared.scheduling.req import Req
from shared.timeline import ReqStage


class PreallocQueue:
    """First come first served among those of the same level (see `PriorityRule`), higher levels first.

    What is reserved here is the backpressure on the prefill fleet.
    """

    def __init__(
        self,
        ledger: KVLedger,
        receiver: ReceiveSide,
        options: ScheduleOptions,
        level: Callable[[Req], int],
    ) -> None:
        self._ledger = ledger
        self._receiver = receiver
        self._level = level
        self._headroom = options.num_reserved_decode_tokens
        self._queue: list[tuple[Req, NodeRef]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, req: Req, prefill: NodeRef) -> None:
        """`req` will be prefilled on `prefill`, once there is room for it here."""
        self._queue.append((req, prefill))

    def remove(self, req: Req) -> None:
        """Forget a request that ended; it holds nothing yet."""
        self._queue = [(other, prefill) for other, prefill in self._queue if other is not req]

    def reserve(self, num_admitted: int, let_pass: Callable[[Sequence[Req]], Sequence[Req]]) -> list[Req]:
        """Reserve rows and pages, one after the other, until one does not fit; returns those now in transfer.

        It ends as well at one that `let_pass` holds back, since somebody has waited for pages for too long.

        Room for a few more tokens of each of the `num_admitted` requests that hold KV here stays free, so that an
        arrival does not force a retraction at once; the only request of a node needs no such room.
        """
        reserved: list[Req] = []
        self._queue.sort(key=lambda waiting: -self._level(waiting[0]))
        while self._queue:
            req, prefill = self._queue[0]
            if not let_pass([req]) or not self._reserve(
                req, self._headroom_tokens(num_admitted + len(reserved))
            ):
                break
            del self._queue[0]
            assert req.kv is not None
            prefix_pages = req.kv.num_tree_pages
            pages = self._ledger.rows.read(req.kv.row, prefix_pages, req.kv.num_pages)
            req.timeline.move_to(ReqStage.TRANSFERRING)
            self._receiver.open(req.key, prefill.incarnation, pages, prefix_pages)
            reserved.append(req)
        return reserved

    @property
    def first(self) -> Req | None:
        """Who is next, and found no room when `reserve` was last called."""
        return self._queue[0][0] if self._queue else None

    def would_fit(self, req: Req, victims: Sequence[Req]) -> bool:
        """Whether there would be room for `req` if `victims`, who run, were retracted and their pages had cooled."""
        ledger = self._ledger
        if ledger.rows.num_free + len(victims) == 0:
            return False
        match = ledger.radix_cache.match_prefix(req.ids, req.extra_key)
        lock = ledger.radix_cache.lock(match.node)
        try:
            headroom = self._headroom_tokens(len(ledger.live) - len(victims))
            needed = ledger.pages_for(len(req.ids)) - len(match.pages) + ledger.pages_for(headroom)
            released = ledger.num_pages_released_by(
                [victim.kv for victim in victims if victim.kv is not None]
            )
            return needed <= ledger.num_available_pages + released
        finally:
            lock.release()

    def _headroom_tokens(self, num_others: int) -> int:
        return self._headroom * (num_others + 1) if num_others else 0

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
