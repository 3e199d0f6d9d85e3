"""The budgets of one prefill decision. Lives for one call of `Batcher.get_next_batch`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.scheduling.req import Req

MAX_RESERVED_OUTPUT = 4096
"""Nobody reserves room for more output than this, as in SGLang: very long outputs are rare and may be retracted."""


class AddReqResult(Enum):
    """What came of offering a request to the adder."""

    CONTINUE = auto()
    """It was added; there may be room for another."""
    NO_TOKEN = auto()
    """The KV pool has no room for it now."""
    OTHER = auto()
    """Another budget is used up: chunk tokens, prefill tokens, or request slots."""


class PrefillAdder:
    """Fills one extend batch within four budgets: KV pages, chunk tokens, prefill tokens, request slots.

    A request is admitted with pages for its whole prompt, so a chunk of it can never lack a page later on.
    """

    def __init__(
        self,
        ledger: KVLedger,
        options: ScheduleOptions,
        running: Sequence[Req],
        new_token_ratio: float,
    ) -> None:
        self._ledger = ledger
        self._new_token_ratio = new_token_ratio
        self._reserved_tokens = sum(self._reserve(req) for req in running)
        self._rem_chunk_tokens = options.chunked_prefill_size
        self._rem_input_tokens = options.max_prefill_tokens
        self.can_run: list[Req] = []
        self.chunked_req: Req | None = None
        """The request of which only a part fits into this batch."""

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """Go on with the request whose last chunk was launched before."""
        self._reserved_tokens += self._reserve(req)
        return self._take(req)

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a waiting request: match its prefix, take a slot and pages, schedule its first chunk."""
        ledger = self._ledger
        if ledger.rows.num_free == 0 or min(self._rem_chunk_tokens, self._rem_input_tokens) <= 0:
            return AddReqResult.OTHER
        reserve = self._reserve(req)
        with ledger.tentative(ledger.match_prefix(req.ids, req.extra_key), req.extra_key) as admission:
            kv = admission.kv
            assert kv is not None, "a row was free a moment ago"
            missing = ledger.pages_for(len(req.ids) + reserve) - kv.num_pages
            if missing + ledger.pages_for(self._reserved_tokens) > ledger.num_available_pages:
                return AddReqResult.NO_TOKEN
            grown = ledger.grow(kv, len(req.ids))
            assert grown, "the pages were counted a moment ago"
            req.kv = admission.keep()
        if not req.num_retractions:  # what it finds of itself afterwards was computed for it
            req.cached_tokens = min(kv.kv_committed_len, req.num_input_ids)
        self._reserved_tokens += reserve
        return self._take(req)

    def _take(self, req: Req) -> AddReqResult:
        todo = len(req.ids) - req.kv_len
        req.extend_len = min(todo, self._rem_chunk_tokens, self._rem_input_tokens)
        self._rem_chunk_tokens -= req.extend_len
        self._rem_input_tokens -= req.extend_len
        self.can_run.append(req)
        if req.extend_len < todo:
            self.chunked_req = req
            return AddReqResult.OTHER
        return AddReqResult.CONTINUE

    def _reserve(self, req: Req) -> int:
        """Tokens of KV that `req` is expected to need beyond those known; its last token needs none."""
        future = min(req.num_wanted - 1, MAX_RESERVED_OUTPUT)
        return int(max(future, 0) * self._new_token_ratio)
