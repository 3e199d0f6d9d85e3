"""Requests that wait for pages and a row of this node, before a prefill node may compute their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.kvcache.radix_cache import Peek
from shared.kvtransfer.receiver import KVReceiver
from shared.protocol.messages import NodeRef
from shared.scheduling.priority import Arrival
from shared.scheduling.req import Req
from shared.timeline import ReqStage


class PreallocQueue:
    """Requests without a reservation, by `PriorityRule.rank` (SGLang: DecodePreallocQueue).

    No prompt is computed before its pages are reserved: that is the backpressure on the prefill fleet.
    """

    def __init__(
        self,
        ledger: KVLedger,
        receiver: KVReceiver,
        options: ScheduleOptions,
        in_order: Callable[[Sequence[Req]], Sequence[Req]],
    ) -> None:
        self._ledger = ledger
        self._receiver = receiver
        self._in_order = in_order
        self._headroom = options.num_reserved_decode_tokens
        self._queue: dict[Req, NodeRef] = {}
        """In order of arrival."""
        self._stopped_at: Req | None = None
        self._peeked: tuple[Req, int, Peek] | None = None
        """The request that was looked up last, how often the RadixCache had changed then, and its cached prefix."""

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, req: Req, prefill: NodeRef) -> None:
        """Queue a request that the node `prefill` will prefill, once there is room for it here."""
        self._queue[req] = prefill

    def remove(self, req: Req) -> None:
        """Forget a request that ended; it holds nothing yet."""
        self._queue.pop(req, None)
        if req is self._stopped_at:
            self._stopped_at = None

    def reserve(self, is_open_to: Callable[[Req], bool]) -> list[Req]:
        """Reserve rows and pages, in order, up to the first request that does not fit or may take no room.

        Returns the requests that have room now; their transfers have begun.
        """
        reserved: list[Req] = []
        self._stopped_at = None
        for req in self._in_order(list(self._queue)):
            if not is_open_to(req) or not self._reserve(req):
                self._stopped_at = req
                break
            prefill = self._queue.pop(req)
            assert req.kv is not None
            prefix_pages = req.kv.num_tree_pages
            pages = self._ledger.rows.read(req.kv.row, prefix_pages, req.kv.num_pages)
            req.timeline.move_to(ReqStage.TRANSFERRING)
            self._receiver.open(req.key, prefill.incarnation, pages, prefix_pages)
            reserved.append(req)
        return reserved

    @property
    def first(self) -> Arrival | None:
        """The request at which `reserve` stopped; None when every request got its room."""
        return Arrival(self._stopped_at, self.would_fit) if self._stopped_at is not None else None

    def would_fit(self, req: Req, victims: Sequence[Req]) -> bool:
        """Whether there would be room for `req` if `victims`, which run, were retracted and their pages had cooled.

        Room for a few more tokens of each request that holds KV here stays free, so that an arrival does not force a
        retraction at once; the only request of a node needs no such room.
        """
        ledger = self._ledger
        if ledger.rows.num_free + len(victims) == 0:
            return False
        peek = self._peek(req)
        kvs = [victim.kv for victim in victims if victim.kv is not None]
        num_others = len(ledger.live) - len(victims)
        headroom_tokens = self._headroom * (num_others + 1) if num_others else 0
        needed = ledger.pages_for(len(req.ids)) - peek.num_pages + ledger.pages_for(headroom_tokens)
        available = ledger.num_available_pages + ledger.num_pages_released_by(kvs)
        return needed <= available - ledger.radix_cache.num_pages_held_only_by((kv.lock for kv in kvs), peek)

    def _peek(self, req: Req) -> Peek:
        """The cached prefix of `req`, looked up again when the RadixCache has changed. This does not refresh the LRU.

        Unlike a local prefill, a transfer may find the whole prompt cached: a prefill node computes its last token.
        """
        cache = self._ledger.radix_cache
        if self._peeked is None or self._peeked[:2] != (req, cache.num_changes):
            self._peeked = req, cache.num_changes, cache.peek(req.ids, len(req.ids), req.extra_key)
        return self._peeked[2]

    def _reserve(self, req: Req) -> bool:
        ledger = self._ledger
        if not self.would_fit(req, ()):
            return False
        match = ledger.radix_cache.match_prefix(req.ids, req.extra_key)
        with ledger.tentative(match, req.extra_key) as tentative:
            kv = tentative.kv
            assert kv is not None, "a row was free a moment ago"
            if not ledger.grow_for_arrival(kv, len(req.ids)):
                return False
            req.kv = tentative.keep()
        req.cached_tokens = kv.kv_committed_len
        return True
