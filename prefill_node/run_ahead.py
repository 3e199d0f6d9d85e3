"""Prompts that are computed ahead of their reservation, while there is nothing else to compute (ADR 40)."""

from __future__ import annotations

import msgspec

from prefill_node.fetches import Fetches
from shared.config import ScheduleOptions
from shared.engine.vitals import Vitals
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import Finish
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.commit import Outcome
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import CachedPrefixes
from shared.timeline import Timeline

MAX_CANDIDATES = 64
"""Of so many requests the cached prefix is looked up, since a lookup costs O(prompt length). Room comes for the first
ones first."""
NO_OUTPUT = SamplingParams(max_new_tokens=0, temperature=0.0)


class RunAhead:
    """Requests whose decode node keeps them waiting for pages, and the chunk that is being computed of one of them.

    To the Batcher and the Launcher a chunk is a request of its own: the beginning of the prompt, which wants no
    output and so ends with its forward. The chunk holds its KV for that forward. Then the RadixCache has its whole
    pages, unlocked as those of any prefix that no request reads. A request that gets its reservation finds them
    there, unless they were evicted. So no request waits for pages that were computed ahead.
    """

    def __init__(
        self,
        ledger: KVLedger,
        options: ScheduleOptions,
        batcher: Batcher,
        fetches: Fetches,
        vitals: Vitals,
    ) -> None:
        self._ledger = ledger
        self._batcher = batcher
        self._fetches = fetches
        self._vitals = vitals
        self._max_pages = int(options.prefill_ahead_share * ledger.num_pages_with_windows)
        self._chunk_pages = max(min(options.chunk_tokens, options.max_prefill_tokens) // ledger.page_size, 1)
        self._cached = CachedPrefixes(ledger)
        self._waiting: dict[Req, int] = {}
        """How many tokens were computed ahead for each."""
        self._chunk: Req | None = None
        self.chunk_of: Req | None = None
        """The request of which a chunk is being computed."""

    @property
    def num_pages(self) -> int:
        """Cached pages that were computed ahead for requests that still wait."""
        return sum(map(self._num_ahead, self._waiting))

    def add(self, req: Req) -> None:
        """Let the prompt of `req`, which waits for its reservation, be computed ahead. None of its KV is held.

        It is passed over while pages of it are fetched.
        """
        if self._max_pages and self._ledger.keep_prefixes:
            self._waiting[req] = 0

    def reserved(self, req: Req) -> None:
        """Take note that `req` waits no more: its pages no longer count as computed ahead."""
        num_tokens = self._waiting.pop(req, 0)
        if num_tokens:
            num_left = self._num_ahead(req) * self._ledger.page_size
            self._vitals.num_ahead_evicted_tokens += max(num_tokens - num_left, 0)
        self._cached.forget(req)

    def remove(self, req: Req) -> None:
        """Forget a request that ended, and drop its chunk."""
        self.reserved(req)
        if req is self.chunk_of:
            self._end_chunk()

    def add_chunk(self) -> None:
        """Give the Batcher the next chunk, if there is one. Call it when nothing waits or is in flight.

        There is room for the chunk, so the next plan has it, and it has no other request.
        """
        assert self._chunk is None
        found = self._next()
        if found is None:
            return
        req, num_tokens = found
        ids = tuple(req.ids[:num_tokens])
        beginning = msgspec.structs.replace(req.work, input_ids=ids, params=NO_OUTPUT, output_ids=())
        timeline = Timeline(req.timeline.role, clock=req.timeline.clock)
        self._chunk, self.chunk_of = Req(req.key, beginning, timeline, max_output_len=0), req
        self._batcher.add(self._chunk)

    def settle(self, outcome: Outcome) -> Req | None:
        """Take the chunk out of `outcome`, and return the request of which it has been computed, if it has.

        A chunk whose forward failed fails its request.
        """
        chunk, req = self._chunk, self.chunk_of
        if chunk is None or req is None:
            return None
        if chunk in outcome.failed:
            outcome.failed[req] = outcome.failed.pop(chunk)
            self._end_chunk()
        if chunk not in outcome.computed:
            return None
        outcome.computed.remove(chunk)
        if outcome.prefilled is not None:
            num_tokens, seconds = outcome.prefilled
            req.ahead_s += seconds
            if req in self._waiting:
                self._waiting[req] += num_tokens
            self._vitals.num_ahead_tokens += num_tokens
        if chunk in outcome.finished:
            outcome.finished.remove(chunk)
            self._end_chunk()
        return req

    def _next(self) -> tuple[Req, int] | None:
        """The first request in order whose prompt is not cached, and the tokens with which its next chunk ends."""
        ledger, num_ahead = self._ledger, self.num_pages
        waiting = [req for req in self._waiting if req.key not in self._fetches.awaited]
        for req in self._batcher.in_order(waiting)[:MAX_CANDIDATES]:
            prefix = self._cached.peek(req)
            num_cached = prefix.num_pages
            num_wanted = (len(req.matchable_ids) - 1) // ledger.page_size - num_cached
            if num_wanted <= 0:
                continue
            # Neither what is cached of this prompt nor what was computed ahead of others is evicted for it.
            available = ledger.available
            num_evictable = available.pages - num_cached - (num_ahead - self._num_ahead(req))
            num_evictable = min(num_evictable, available.window_pages - ledger.num_windows_to_protect(prefix))
            num_pages = min(num_wanted, self._chunk_pages, self._max_pages - num_ahead, num_evictable)
            if num_pages <= 0 or not ledger.rows.num_free:
                return None
            num_cached_tokens = num_cached * ledger.page_size
            req.ahead_from = min(
                num_cached_tokens, req.num_input_ids if req.ahead_from is None else req.ahead_from
            )
            return req, num_cached_tokens + num_pages * ledger.page_size
        return None

    def _num_ahead(self, req: Req) -> int:
        """Cached pages that were computed ahead for `req`."""
        if req.ahead_from is None:
            return 0
        return max(self._cached.peek(req).num_pages - req.ahead_from // self._ledger.page_size, 0)

    def _end_chunk(self) -> None:
        """Let the RadixCache have what is committed of the chunk. Results in flight are dropped."""
        chunk = self._chunk
        assert chunk is not None
        self._batcher.remove(chunk)
        if chunk.finish is None:
            chunk.end(Finish("abort"))
        if chunk.kv is not None:
            self._ledger.cache_finished_req(chunk.kv, chunk.ids)
            chunk.kv = None
        self._chunk = self.chunk_of = None
