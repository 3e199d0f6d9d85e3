"""Chooses what the next forward computes: prefill first, else one decode step of everything that runs."""

from __future__ import annotations

from shared import log
from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.scheduling.new_token_ratio import NewTokenRatio
from shared.scheduling.prefill_adder import AddReqResult, PrefillAdder
from shared.scheduling.req import Req
from shared.scheduling.schedule_batch import ScheduleBatch, schedule
from shared.scheduling.schedule_policy import POLICIES
from shared.timeline import ReqStage


class Batcher:
    """The scheduler of one node, for both roles. Decides only; nothing runs here.

    Every live request that holds a place is in exactly one of `waiting_queue`, `chunked_req`, `last_batch` (an
    extend whose requests have not been merged yet) and `running_batch`. On a prefill node a request wants one
    token, so it never reaches `running_batch`.
    """

    def __init__(self, ledger: KVLedger, options: ScheduleOptions) -> None:
        self._ledger = ledger
        self._options = options
        self._policy = POLICIES[options.schedule_policy]
        self._new_token_ratio = NewTokenRatio(options.schedule_conservativeness)
        self._num_decode_steps = 0
        self.waiting_queue: list[Req] = []
        self.chunked_req: Req | None = None
        self.last_batch: ScheduleBatch | None = None
        self.running_batch: list[Req] = []
        self.num_retractions = 0

    # ------------------------------------------------------------------------------------------- plan
    def get_next_batch(self) -> ScheduleBatch | None:
        """The next forward, or None when there is nothing to compute, or no page for it yet."""
        self._settle_last_batch()
        self.last_batch = self._next_prefill_batch() or self._next_decode_batch()
        return self.last_batch

    def _settle_last_batch(self) -> None:
        if self.last_batch is not None and self.last_batch.is_extend:
            self.running_batch += [
                item.req
                for item in self.last_batch.items
                if item.req is not self.chunked_req and not item.is_stale
            ]
        self.running_batch = [req for req in self.running_batch if req.wants_decode]
        self.last_batch = None

    def _next_prefill_batch(self) -> ScheduleBatch | None:
        if self.chunked_req is None and not self.waiting_queue:
            return None
        adder = PrefillAdder(
            self._ledger,
            self._options,
            self.running_batch,
            self._new_token_ratio.value,
        )
        result = AddReqResult.CONTINUE
        if self.chunked_req is not None:
            result = adder.add_chunked_req(self.chunked_req)
        for req in self._policy(self.waiting_queue) if result is AddReqResult.CONTINUE else ():
            if adder.add_one_req(req) is not AddReqResult.CONTINUE:
                break
        if not adder.can_run:
            return None
        self.chunked_req = adder.chunked_req
        admitted = {id(req) for req in adder.can_run}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in admitted]
        for req in adder.can_run:
            if req.timeline.stage is not ReqStage.PREFILLING:
                req.timeline.move_to(ReqStage.PREFILLING)
        items = [schedule(r, r.extend_len, samples=r is not self.chunked_req) for r in adder.can_run]
        return ScheduleBatch(tuple(items), is_extend=True)

    def _next_decode_batch(self) -> ScheduleBatch | None:
        self._retract_decode()
        if not self.running_batch:
            if not self.waiting_queue:
                self._new_token_ratio.reset()
            return None
        if self._num_missing_pages() > self._ledger.num_available_pages:
            return None  # the last request waits for pages that cool, or that transfers hold
        self._num_decode_steps += 1
        self._new_token_ratio.decay()
        for req in self.running_batch:
            assert req.kv is not None
            grown = self._ledger.grow(req.kv, req.kv_len + 1)
            assert grown, "the pages were counted a moment ago"
        return ScheduleBatch(
            tuple(schedule(req, 1, samples=True) for req in self.running_batch), is_extend=False
        )

    # ---------------------------------------------------------------------------------------- retract
    def _retract_decode(self) -> None:
        """Take KV from the requests that lose least until the others fit one more step.

        No request is half prefilled now: a `chunked_req` holds the pages of its whole prompt and goes first.
        """
        every = self._options.retract_every
        forced = every > 0 and self._num_decode_steps % every == every - 1
        if forced and self.running_batch:
            self._num_decode_steps += 1
            self._retract(self._next_victim())
        if self.running_batch and self._num_missing_pages() > self._ledger.num_available_pages:
            while (
                len(self.running_batch) > 1 and self._num_missing_pages() > self._ledger.num_available_pages
            ):
                self._retract(self._next_victim())
            self._new_token_ratio.rise_after_retraction(self.running_batch)

    def _next_victim(self) -> Req:
        """Fewest output tokens first: least is lost. Then the longest prompt, then the key, for a fixed order."""
        return min(self.running_batch, key=lambda req: (req.output_len, -req.num_input_ids, str(req.key)))

    def _retract(self, req: Req) -> None:
        """Release the request's KV (what the RadixCache keeps of it is evictable) and queue it for re-prefill."""
        assert req.kv is not None
        self.running_batch.remove(req)
        freed = self._ledger.cache_finished_req(req.kv, req.ids)
        req.kv = None
        req.drop_results_in_flight()
        req.num_retractions += 1
        req.timeline.move_to(ReqStage.RETRACTED)
        self.waiting_queue.insert(0, req)
        self.num_retractions += 1
        log.event("retract", key=req.key, output_len=req.output_len, freed_pages=freed)

    def _num_missing_pages(self) -> int:
        ledger = self._ledger
        return sum(
            ledger.pages_for(req.kv_len + 1) - req.kv.num_pages
            for req in self.running_batch
            if req.kv is not None
        )

    # ----------------------------------------------------------------------------------- in and out
    def add(self, req: Req) -> None:
        """A request whose KV is to be computed here."""
        self.waiting_queue.append(req)

    def admit_prefilled(self, req: Req) -> None:
        """A request whose KV came from elsewhere and whose next token is known: it decodes from now on."""
        assert req.kv is not None
        self.running_batch.append(req)

    def remove(self, req: Req) -> None:
        """Forget a request that ended, wherever it is. Its KV is the caller's to release."""
        if req is self.chunked_req:
            self.chunked_req = None
        self.waiting_queue = [other for other in self.waiting_queue if other is not req]
        self.running_batch = [other for other in self.running_batch if other is not req]
