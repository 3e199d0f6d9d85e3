"""Requests that wait for pages and a row of this node, before another node may send their KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger, ReqKV, Room
from shared.kvcache.radix_cache import Peek
from shared.kvtransfer.receiver import KVReceiver
from shared.protocol.messages import NodeRef
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import Arrival
from shared.timeline import Clock, ReqStage

MOVE_MARGIN = 4
"""A moved request gets room for so many times the tokens that are kept for each running request: it runs on at the
node that it leaves while its pages come, and no page can be added to those that were reserved."""


@dataclass(frozen=True, slots=True)
class Reservations:
    """What became of the requests that wanted room: those left out wait."""

    reserved: list[Req]
    """Their transfers have begun."""
    refused: list[Req]
    """Moving requests, which find room at once or not at all."""


@dataclass(eq=False, slots=True)
class _Moving:
    source: NodeRef
    is_cooling: bool = False
    """Whether the pages for it were free one turn ago, but had to cool."""


class PreallocQueue:
    """Requests without a reservation, by `PriorityRule.rank` (SGLang: DecodePreallocQueue).

    No request holds pages on its prefill node before pages are reserved for it here: that is the backpressure on the
    prefill fleet, which only computes ahead what it may evict again (ADR 40). A request that moves here while it runs
    on another decode node never waits, since it holds pages there: two nodes would wait for each other's pages. It
    gets its room in the turn in which it came, or is refused. Only where its pages are free and have to cool, it has
    one more turn.
    """

    def __init__(
        self,
        ledger: KVLedger,
        receiver: KVReceiver,
        options: ScheduleOptions,
        in_order: Callable[[Sequence[Req]], Sequence[Req]],
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._receiver = receiver
        self._in_order = in_order
        self._clock = clock
        self._headroom = options.num_reserved_decode_tokens
        self._move_margin = MOVE_MARGIN * max(self._headroom, ledger.page_size)
        self._queue: dict[Req, tuple[NodeRef, float]] = {}
        """The prefill node of each, and when it came, in that order."""
        self._moving: dict[Req, _Moving] = {}
        self._stopped_at: Req | None = None
        self._peeked: tuple[Req, int, Peek] | None = None
        """The request that was looked up last, how often the RadixCache had changed then, and its cached prefix."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._moving)

    def add(self, req: Req, prefill: NodeRef) -> None:
        """Queue a request that the node `prefill` will prefill, once there is room for it here."""
        self._queue[req] = prefill, self._clock()

    def add_moving(self, req: Req, source: NodeRef) -> None:
        """Have the next `reserve` find room for a request that runs on the decode node `source`, or refuse it."""
        self._moving[req] = _Moving(source)

    def remove(self, req: Req) -> None:
        """Forget a request that ended; it holds nothing yet."""
        self._queue.pop(req, None)
        self._moving.pop(req, None)
        if req is self._stopped_at:
            self._stopped_at = None

    def reserve(
        self, is_open_to: Callable[[Req], bool], is_open_to_move: Callable[[Req], bool]
    ) -> Reservations:
        """Reserve rows and pages, in order, up to the first request that does not fit or may take no room.

        Moving requests come last, and only while no other one waits here.
        """
        reserved: list[Req] = []
        self._stopped_at = None
        for req in self._in_order(list(self._queue)):
            if not is_open_to(req) or not self._reserve(req, len(req.ids)):
                self._stopped_at = req
                break
            self._open(req, self._queue.pop(req)[0])
            reserved.append(req)
        refused: list[Req] = []
        for req, moving in list(self._moving.items()):
            num_tokens = min(len(req.ids) + self._move_margin, req.num_input_ids + req.max_output_len)
            has_room = self._stopped_at is None and is_open_to_move(req) and self._fits(req, num_tokens)
            if has_room and self._reserve(req, num_tokens):
                self._open(req, moving.source, len(req.ids))
                reserved.append(req)
            elif has_room and not moving.is_cooling:
                moving.is_cooling = True
                continue
            else:
                refused.append(req)
            del self._moving[req]
        return Reservations(reserved, refused)

    def _open(self, req: Req, source: NodeRef, num_known: int | None = None) -> None:
        assert req.kv is not None
        prefix_pages = req.kv.num_tree_pages
        pages = self._ledger.rows.read(req.kv.row, prefix_pages, req.kv.num_pages)
        req.timeline.move_to(ReqStage.TRANSFERRING)
        windows = self._ledger.window_pages_of(pages)
        self._receiver.open(req.key, source.incarnation, pages, prefix_pages, num_known, windows)

    @property
    def longest_wait_s(self) -> float:
        """How long the request has waited that came first; 0 if none waits."""
        return self._clock() - next(iter(self._queue.values()))[1] if self._queue else 0.0

    @property
    def first(self) -> Arrival | None:
        """The request at which `reserve` stopped; None when every request got its room."""
        return Arrival(self._stopped_at, self.would_fit) if self._stopped_at is not None else None

    def would_fit(self, req: Req, victims: Sequence[Req]) -> bool:
        """Whether there would be room for `req` if `victims`, which run, were retracted and their pages had cooled.

        Room for a few more tokens of each request that holds KV here stays free, so that an arrival does not force a
        retraction at once; the only request of a node needs no such room.
        """
        return self._fits(req, len(req.ids), victims)

    def _fits(self, req: Req, num_tokens: int, victims: Sequence[Req] = ()) -> bool:
        ledger = self._ledger
        if ledger.rows.num_free + len(victims) == 0:
            return False
        peek = self._peek(req)
        kvs = [victim.kv for victim in victims if victim.kv is not None]
        others = [kv for kv in ledger.live.values() if kv not in kvs]
        needed = self._missing(req, num_tokens, peek) + self._headroom_beside(others, num_tokens)
        available = ledger.available + ledger.released_by(kvs)
        return (available - ledger.held_only_by(kvs, peek, len(req.ids))).holds(needed)

    def _missing(self, req: Req, num_tokens: int, peek: Peek) -> Room:
        """What `req` lacks for `num_tokens` tokens, of which a token behind the known ones sees the last window."""
        num_pages, first = self._ledger.pages_for(num_tokens), self._ledger.first_window_page(len(req.ids))
        return Room(num_pages - peek.num_pages, max(num_pages - max(peek.num_pages, first), 0))

    def _headroom_beside(self, others: Sequence[ReqKV], num_tokens: int) -> Room:
        """What stays free for a few more tokens of each of `others`, and of one of `num_tokens` tokens."""
        lens = [num_tokens, *(kv.kv_allocated_len for kv in others)] if others else []
        return self._ledger.growth(lens, [self._headroom] * len(lens))

    def _peek(self, req: Req) -> Peek:
        """The cached prefix of `req`, looked up again when the RadixCache has changed. This does not refresh the LRU.

        Unlike a local prefill, a transfer may find the whole prompt cached: a prefill node computes its last token.
        """
        cache = self._ledger.radix_cache
        if self._peeked is None or self._peeked[:2] != (req, cache.num_changes):
            self._peeked = req, cache.num_changes, cache.peek(req.ids, len(req.ids), req.extra_key)
        return self._peeked[2]

    def _reserve(self, req: Req, num_tokens: int) -> bool:
        ledger = self._ledger
        if not self._fits(req, num_tokens):
            return False
        match = ledger.radix_cache.match_prefix(req.ids, req.extra_key)
        with ledger.tentative(match, req.extra_key) as tentative:
            kv = tentative.kv
            assert kv is not None, "a row was free a moment ago"
            ledger.slide(kv, len(req.ids))
            if not ledger.grow_for_arrival(kv, num_tokens):
                return False
            req.kv = tentative.keep()
        req.cached_tokens = kv.kv_committed_len
        return True
