"""Forwards that no request asks for: those that a start measures, warms up with and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.engine.engine_shape import EngineShape
from shared.engine.model_worker_batch import CountedRows, ModelWorkerBatch, snapshot
from shared.engine.sampling_inputs import VocabMask
from shared.kvcache.allocator import PageAllocator
from shared.kvcache.ledger import KVLedger
from shared.kvcache.pools import ReqToTokenPool
from shared.kvcache.radix_cache import RadixCache
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import ReqKey, Work
from shared.protocol.sampling_params import SamplingParams, TokenBias
from shared.scheduling.plan import ScheduleBatch, ScheduledReq
from shared.scheduling.prefill_adder import tokens_beside
from shared.scheduling.req import Req
from shared.timeline import Role, Timeline

GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    min_new_tokens=1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=(TokenBias(0, 1.0),),
    logprobs=LogprobParams(start_len=0, top_num=20, token_ids=(0,)),
)
"""Every feature of sampling at once, and as many top logprobs as OpenAI's API allows."""


@dataclass(frozen=True)
class Extend:
    """The tokens `ids` of a row, from position `start` on."""

    row: int
    start: int
    ids: Sequence[int]


class StartBatches:
    """Makes snapshots as the launcher does, of its own requests. A row reads and writes the scratch page at first."""

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._rows = ReqToTokenPool(shape.num_rows, shape.context_length, shape.cache.page_size)
        ledger = KVLedger(
            PageAllocator(2), self._rows, RadixCache(shape.cache.page_size), keep_prefixes=False
        )
        admitted = [ledger.admit(ledger.match_prefix([], ""), "") for _ in range(shape.num_rows)]
        self._kvs = {kv.row: kv for kv in admitted if kv is not None}
        self._counted_rows = CountedRows()
        self._num_made = 0

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Give a row pages of its own."""
        self._rows.write(row, 0, pages)

    def forward(
        self,
        extends: Sequence[Extend],
        decodes: Sequence[tuple[int, int]] = (),
        params: SamplingParams = GREEDY,
    ) -> ModelWorkerBatch:
        """A forward of extends, and of a decode step of (row, position). Every sequence samples."""
        batch = ScheduleBatch(
            tuple(self._scheduled(e.row, e.start, e.ids, params) for e in extends),
            tuple(self._scheduled(row, start, [0], params) for row, start in decodes),
        )
        return snapshot(batch, self._rows, (), frozenset({0}), self._counted_rows)

    def mask_of(self, batch: ModelWorkerBatch) -> VocabMask[np.ndarray]:
        """The mask of a batch whose sequences have grammars that allow every token."""
        num_sampled = len(batch.sampled_B)
        allowed_GW = np.full((num_sampled, -(-self._shape.model.vocab_size // 32)), -1, dtype=np.int32)
        return VocabMask(entries_G=np.arange(num_sampled), allowed_GW=allowed_GW)

    def largest(self) -> list[ModelWorkerBatch]:
        """The forwards that need the most memory, with EVERYTHING: of most prompt tokens, of most rows, and of both.

        The decode step has as many tokens in all as one whole context: Triton's attention needs the same memory for
        any, torch's needs more for more. With mixed chunks, a forward has prompt tokens beside a decode step, and may
        have more tokens than either alone.
        """
        shape, whole = self._shape, self._shape.context_length
        found = [self.forward(self._prompts(shape.max_extend_tokens, shape.num_rows), params=EVERYTHING)]
        if shape.decodes:
            last = max(whole // shape.num_rows, 1) - 1
            steps = [(row, last) for row in range(shape.num_rows)]
            found.append(self.forward([], steps, EVERYTHING))
            if shape.schedule.enable_mixed_chunk:
                most_tokens = tokens_beside(shape.num_rows - 1, shape.max_extend_tokens)
                num_prompts = min(-(-most_tokens // whole), shape.num_rows)
                num_tokens = tokens_beside(shape.num_rows - num_prompts, shape.max_extend_tokens)
                prompts = self._prompts(num_tokens, num_prompts)
                found.append(self.forward(prompts, steps[num_prompts:], EVERYTHING))
        return found

    def _prompts(self, num_tokens: int, num_rows: int) -> list[Extend]:
        """So many tokens, or as many as fit, over so many rows, or one for each.

        The first of them ends where the context does. The others are whole prompts: they have a token each, or more
        where a chunk is larger than the context, and so has several whole prompts.
        """
        whole, num_left = self._shape.context_length, num_tokens
        extends: list[Extend] = []
        for num_rows_left in range(min(num_rows, num_left), 0, -1):
            length = min(num_left - num_rows_left + 1, whole)
            extends.append(Extend(len(extends), 0 if extends else whole - length, [0] * length))
            num_left -= length
        return extends

    def usual(self) -> list[ModelWorkerBatch]:
        """A greedy forward of each size: extends of 1, 2, 4, ... tokens, and decode steps of 1, 2, 4, ... rows."""
        shape = self._shape
        lengths = _doubling(min(shape.max_extend_tokens, shape.context_length))
        steps = _doubling(shape.num_rows) if shape.decodes else []
        extends = [self.forward([Extend(0, 0, [0] * length)]) for length in lengths]
        return extends + [self.forward([], [(row, 0) for row in range(num_rows)]) for num_rows in steps]

    def _scheduled(self, row: int, start: int, ids: Sequence[int], params: SamplingParams) -> ScheduledReq:
        self._num_made += 1
        key, work = ReqKey("start", str(self._num_made)), Work((*[0] * start, *ids), params)
        req = Req(key, work, Timeline(Role.DECODE), max_output_len=1, kv=self._kvs[row])
        return ScheduledReq(req, req.generation, start, len(ids), position=0)


def _doubling(last: int) -> list[int]:
    """1, 2, 4, ... and `last`."""
    return [1 << i for i in range((last - 1).bit_length())] + [last]
