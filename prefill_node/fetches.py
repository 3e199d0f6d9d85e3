"""Pages of a prompt that come from another node's cache, so that they need not be computed here.

    cooling      free pages are still in use by a forward, or went to the next one; there are enough of them
    reserved     the pages have a place here, and the receiver owns it; the lender is asked for them
    (ended)      what came is in the RadixCache, and the requests that waited for it are matched with it

A fetch never waits for pages that are taken, and takes none before a request that ranks higher and lacks room: then
the prompt is computed. It is also computed when the fetch fails, or takes longer than computing would. Requests that
want the same pages share one fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared import log
from shared.kvcache.ledger import KVLedger, ReqKV
from shared.kvtransfer.lending import loan_record
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.states import Received, ReceiveFailed
from shared.protocol.messages import ReqKey, Source
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import Clock

GoOn = Callable[[], None]


@dataclass(eq=False, slots=True)
class _Waiting:
    go_on: GoOn
    since: float


@dataclass(eq=False, slots=True)
class _Fetch:
    key: ReqKey
    lender: str
    ids: Sequence[int]
    """The tokens of the pages, and of those before them that are here."""
    extra_key: str
    deadline: float
    kv: ReqKV | None = None
    waiting: dict[Req, _Waiting] = field(default_factory=dict)

    def gives(self, ids: Sequence[int], extra_key: str) -> bool:
        """Whether its pages are those of at least half of `ids`, from the beginning on."""
        num_tokens = min(len(ids), len(self.ids))
        is_most = 2 * num_tokens >= len(ids)
        return is_most and self.extra_key == extra_key and self.ids[:num_tokens] == ids[:num_tokens]


class Fetches:
    """The fetches of a prefill node, by the key of the request that came first. Used by the scheduler thread."""

    def __init__(self, ledger: KVLedger, receiver: KVReceiver, batcher: Batcher, clock: Clock) -> None:
        self._ledger = ledger
        self._receiver = receiver
        self._batcher = batcher
        self._clock = clock
        self._fetches: dict[ReqKey, _Fetch] = {}
        self.awaited: dict[ReqKey, _Fetch] = {}
        """The fetch that each waiting request waits for."""

    def __len__(self) -> int:
        return len(self._fetches)

    def start(self, req: Req, source: Source, within_s: float, go_on: GoOn) -> None:
        """Fetch what `source` has of the prompt of `req`, then call `go_on`, also when the fetch fails.

        `go_on` is called once, within `within_s` seconds and perhaps before `start` returns, unless `req` is removed.
        """
        self._batcher.arrived(req)
        now, size = self._clock(), self._ledger.page_size
        num_pages = min(source.num_pages, (len(req.matchable_ids) - 1) // size)
        ids = req.ids[: max(num_pages, 0) * size]
        if not ids or not self._ledger.keep_prefixes:
            self._refuse(req.key, source.node.incarnation, "the borrower can use none of these pages")
            go_on()
            return
        for shared in self._fetches.values():
            if shared.waiting and shared.gives(ids, req.extra_key):
                self._await(shared, req, go_on)
                self._refuse(req.key, source.node.incarnation, "another request has asked for these pages")
                return
        fetch = _Fetch(req.key, source.node.incarnation, ids, req.extra_key, now + within_s)
        self._fetches[req.key] = fetch
        self._await(fetch, req, go_on)
        self._reserve(fetch, may_cool=True)

    def remove(self, req: Req) -> None:
        """Forget a request that ended, and give up its fetch if it was for no other request."""
        fetch = self.awaited.pop(req.key, None)
        if fetch is None:
            return
        del fetch.waiting[req]
        if not fetch.waiting:
            self._give_up(fetch, "the request has ended")

    def advance(self) -> None:
        """Reserve pages that have cooled, and give up what has taken too long."""
        now = self._clock()
        for fetch in list(self._fetches.values()):
            if fetch.kv is None:
                self._reserve(fetch, may_cool=now < fetch.deadline)
            elif now >= fetch.deadline:
                self._give_up(fetch, "computing these pages takes no longer")

    def received(self, received: Received) -> int:
        """Cache the pages that have come, and let the requests go on. Returns how many tokens they are of."""
        fetch = self._fetches.get(received.key)
        if (
            fetch is None or fetch.kv is None
        ):  # it was refused, and the lender has handed it over all the same
            return 0
        handoff, kv = received.handoff, fetch.kv
        size = self._ledger.page_size
        expected = loan_record(fetch.key, fetch.ids, handoff.kv_len // size, size)
        if handoff.digest != expected.digest:
            log.warn("loan_of_other_tokens", **fetch.key.fields, sent_by=received.sender)
            self._end(fetch, 0)
            return 0
        num_tokens = handoff.kv_len - kv.kv_committed_len
        self._ledger.arrived(kv, handoff.kv_len)
        self._end(fetch, num_tokens)
        return num_tokens

    def failed(self, failed: ReceiveFailed) -> None:
        """The pages do not come: the requests that waited for them have to be computed."""
        fetch = self._fetches.get(failed.key)
        if fetch is not None:  # else it was refused
            log.event("fetch_failed", **failed.key.fields, lender=fetch.lender, reason=failed.reason)
            self._end(fetch, 0)

    def _await(self, fetch: _Fetch, req: Req, go_on: GoOn) -> None:
        fetch.waiting[req] = _Waiting(go_on, self._clock())
        self.awaited[req.key] = fetch

    def _reserve(self, fetch: _Fetch, *, may_cool: bool) -> None:
        """Find a place for the pages, or end the fetch. With `may_cool`, leave it to the next turn to decide."""
        ledger = self._ledger
        match = ledger.radix_cache.match_prefix(fetch.ids, fetch.extra_key)
        num_missing = ledger.pages_for(len(fetch.ids)) - len(match.pages)
        first = next(iter(fetch.waiting))
        is_open = self._batcher.is_open_to(first, self._batcher.first_blocked())
        has_room = ledger.rows.num_free and 0 < num_missing <= ledger.num_available_pages
        if not is_open or not has_room:
            self._end_without_place(fetch)
            return
        with ledger.tentative(match, fetch.extra_key) as tentative:
            assert tentative.kv is not None, "a row was free a moment ago"
            if ledger.grow_for_arrival(tentative.kv, len(fetch.ids)):
                fetch.kv = tentative.keep()
        if fetch.kv is not None:
            pages = ledger.rows.read(fetch.kv.row, len(match.pages), fetch.kv.num_pages)
            windows = ledger.window_pages_of(pages)
            self._receiver.open(fetch.key, fetch.lender, pages, len(match.pages), len(fetch.ids), windows)
        elif not may_cool:
            self._end_without_place(fetch)

    def _end_without_place(self, fetch: _Fetch) -> None:
        self._refuse(fetch.key, fetch.lender, "the borrower has these pages, or no room for them")
        self._end(fetch, 0)

    def _refuse(self, key: ReqKey, lender: str, reason: str) -> None:
        """Have the lender let go of pages that are not wanted."""
        self._receiver.open(key, lender, (), 0)
        self._receiver.cancel(key, reason)

    def _give_up(self, fetch: _Fetch, reason: str) -> None:
        if fetch.kv is None:
            self._end_without_place(fetch)
        else:
            self._receiver.cancel(fetch.key, reason)  # `failed` follows

    def _end(self, fetch: _Fetch, num_tokens: int) -> None:
        """Give the place back, and what has come in it to the RadixCache."""
        del self._fetches[fetch.key]
        for req in fetch.waiting:
            del self.awaited[req.key]
        if fetch.kv is not None:
            self._ledger.cache_finished_req(fetch.kv, fetch.ids)
        now = self._clock()
        for req, waiting in fetch.waiting.items():
            req.fetch_s, req.num_fetched_tokens = now - waiting.since, num_tokens
            waiting.go_on()
