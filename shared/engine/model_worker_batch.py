"""The frozen snapshot of a scheduling decision that crosses to the forward stream: values only, no shared objects.

It has what the sequences of the forward ask of sampling, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.sampling_inputs import (
    BiasInputs,
    DrawInputs,
    HostSampling,
    KnownTokens,
    LogprobInputs,
    LogprobShare,
    MaskedInputs,
    PenaltyInputs,
    SamplingInputs,
)
from shared.kvcache.pools import ReqToTokenPool
from shared.kvcache.windows import WindowPages
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.plan import ScheduleBatch, ScheduledReq
from shared.scheduling.req import Req


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWorkerBatch:
    """B sequences with T tokens in all.

    Extends come first and carry their prompt tokens in `input_ids`. The last `num_decodes` sequences are a decode
    step and carry nothing: each computes the last sampled token of its row, read from the FutureMap.
    `future_writes` are (row, token) pairs of the host, which enter the FutureMap before this forward reads it.
    `sampled_B` lists which sequences sample. In SGLang, rows are req_pool_indices, starts extend_prefix_lens, and
    lengths extend_seq_lens. Layers with windows find their pages in `window_table_BP`, where 0 is for a page that no
    token of this forward sees; None: in `page_table_BP`, as all layers.
    """

    num_decodes: int
    input_ids: np.ndarray
    rows_B: np.ndarray
    starts_B: np.ndarray
    lengths_B: np.ndarray
    page_table_BP: np.ndarray
    sampled_B: np.ndarray
    sampling: HostSampling
    future_writes: tuple[tuple[int, int], ...]
    window_table_BP: np.ndarray | None = None


class CountedRows:
    """Which sequence's tokens the device has counted in each row, and up to which output position.

    A step that goes on where the last one of that row stopped needs to send nothing. Any other (the first of a
    row, after a transfer, a retraction or a re-prefill) sends the known tokens, which the device counts
    anew. No token of the row is in flight then, so the counts are exact.

    The device has a slot for each row that ever had a penalized sequence.
    """

    def __init__(self) -> None:
        self._next: dict[int, tuple[ReqKey, int, int]] = {}
        self._slots: dict[int, int] = {}

    @property
    def num_slots(self) -> int:
        """Rows that have a slot."""
        return len(self._slots)

    def slot(self, req: Req) -> int:
        """The slot of the row that `req` holds."""
        assert req.kv is not None
        return self._slots.setdefault(req.kv.row, len(self._slots))

    def go_on(self, item: ScheduledReq) -> bool:
        """Note that `item` samples; False when the tokens before it have to be counted anew."""
        assert item.req.kv is not None
        assert item.position is not None
        row, position = item.req.kv.row, item.position
        counted = self._next.get(row) == (item.req.key, item.generation, position)
        self._next[row] = (item.req.key, item.generation, position + 1)
        assert counted or position == item.req.output_len, (
            f"{item.req.key}: tokens up to position {position} are to be counted, {item.req.output_len} are known"
        )
        return counted


Snapshot = Callable[
    [
        ScheduleBatch,
        ReqToTokenPool,
        Sequence[tuple[int, int]],
        frozenset[int],
        CountedRows,
        WindowPages | None,
    ],
    Any,
]
"""`snapshot`, or what else makes of a decision what a stream takes: a simulated one takes the decision itself."""


def snapshot(
    batch: ScheduleBatch,
    rows: ReqToTokenPool,
    future_writes: Sequence[tuple[int, int]],
    eos_token_ids: frozenset[int],
    counted_rows: CountedRows | None = None,
    windows: WindowPages | None = None,
) -> ModelWorkerBatch:
    """Copy what the forward needs out of the scheduler's own, still changing, state.

    `counted_rows` knows which tokens earlier snapshots had the device count; None when there were none.
    """
    items = batch.items
    kvs = [item.req.kv for item in items]
    row_ids = np.array([kv.row for kv in kvs if kv is not None], dtype=np.int64)
    assert len(row_ids) == len(items), "a scheduled request holds KV"
    starts = np.array([item.start for item in items], dtype=np.int64)
    lengths = np.array([item.length for item in items], dtype=np.int64)
    num_pages = -(-int((starts + lengths).max()) // rows.page_size)
    input_ids: list[int] = []
    for item in batch.extends:
        input_ids += item.req.ids[item.start : item.start + item.length]
    sampled = [i for i, item in enumerate(items) if item.position is not None]
    table_BP = rows.pages[row_ids, :num_pages]
    return ModelWorkerBatch(
        num_decodes=len(batch.decodes),
        input_ids=np.array(input_ids, dtype=np.int64),
        rows_B=row_ids,
        starts_B=starts,
        lengths_B=lengths,
        page_table_BP=table_BP,
        sampled_B=np.array(sampled, dtype=np.int64),
        sampling=_sampling_inputs(
            [items[i] for i in sampled],
            eos_token_ids,
            counted_rows or CountedRows(),
            _input_logprobs(batch.extends),
        ),
        future_writes=tuple(future_writes),
        window_table_BP=None if windows is None else windows.of_page[table_BP],
    )


# ----------------------------------------------------------------------------------- what sampling is asked
def _sampling_inputs(
    items: Sequence[ScheduledReq],
    eos_token_ids: frozenset[int],
    counted_rows: CountedRows,
    input_logprobs: LogprobInputs[np.ndarray] | None,
) -> HostSampling:
    """The parameters of `items`, all of which sample."""
    params = [item.req.params for item in items]
    positions = [item.position or 0 for item in items]
    return SamplingInputs(
        draws=_draws(params, positions),
        masked=_masked(params, positions, eos_token_ids),
        penalties=_penalties(items, counted_rows),
        biases=_biases(params),
        logprobs=_output_logprobs(params),
        input_logprobs=input_logprobs,
    )


def _input_logprobs(items: Sequence[ScheduledReq]) -> LogprobInputs[np.ndarray] | None:
    """The prompt logprobs that an extend of `items` brings: that of the token at i + 1 comes from position i.

    They belong to output position 0: a request that resumes after it brings none.
    """
    rows: list[int] = []
    targets: list[int] = []
    shares: list[tuple[int, int, LogprobParams]] = []
    first_row = 0
    for b, item in enumerate(items):
        req, start, end = item.req, item.start, item.start + item.length
        wanted_from = req.input_logprobs_from
        if wanted_from is not None:
            first, last = max(start, wanted_from), min(end, req.num_input_ids - 1)
            if first < last:
                rows += range(first_row + first - start, first_row + last - start)
                targets += req.ids[first + 1 : last + 1]
                assert req.params.logprobs is not None
                shares.append((b, last - first, req.params.logprobs))
        first_row += item.length
    return _logprobs(rows, targets, shares) if rows else None


def _draws(params: Sequence[SamplingParams], positions: Sequence[int]) -> DrawInputs[np.ndarray] | None:
    if all(p.is_greedy for p in params):
        return None
    temperatures_S = np.array([0.0 if p.is_greedy else p.temperature for p in params], dtype=np.float32)
    top_ks_S = np.array([p.top_k for p in params], dtype=np.int64)
    top_ps_S = np.array([p.top_p for p in params], dtype=np.float32)
    min_ps_S = np.array([p.min_p for p in params], dtype=np.float32)
    filters_S = (top_ks_S > 0) | (top_ps_S < 1) | (min_ps_S > 0)
    return DrawInputs(
        temperatures_S=temperatures_S,
        top_ks_S=top_ks_S,
        top_ps_S=top_ps_S,
        min_ps_S=min_ps_S,
        uniforms_S=uniforms([p.seed for p in params], positions),
        needs_filter=bool(filters_S[temperatures_S > 0].any()),
    )


def _masked(
    params: Sequence[SamplingParams], positions: Sequence[int], eos_token_ids: frozenset[int]
) -> MaskedInputs[np.ndarray] | None:
    masked = [
        (i, token)
        for i, (p, position) in enumerate(zip(params, positions, strict=True))
        if position < p.min_new_tokens
        for token in (*p.stop_token_ids, *(() if p.ignore_eos else sorted(eos_token_ids)))
    ]
    if not masked:
        return None
    entries, token_ids = zip(*masked, strict=True)
    return MaskedInputs(
        entries_N=np.array(entries, dtype=np.int64), token_ids_N=np.array(token_ids, dtype=np.int64)
    )


def _penalties(items: Sequence[ScheduledReq], counted_rows: CountedRows) -> PenaltyInputs[np.ndarray] | None:
    entries = [i for i, item in enumerate(items) if item.req.params.has_penalties]
    if not entries:
        return None
    penalized = [items[i].req for i in entries]
    anew = [items[i].req for i in entries if not counted_rows.go_on(items[i])]
    params = [req.params for req in penalized]
    return PenaltyInputs(
        entries_P=np.array(entries, dtype=np.int64),
        slots_P=np.array([counted_rows.slot(req) for req in penalized], dtype=np.int64),
        frequency_P=np.array([p.frequency_penalty for p in params], dtype=np.float32),
        presence_P=np.array([p.presence_penalty for p in params], dtype=np.float32),
        repetition_P=np.array([p.repetition_penalty for p in params], dtype=np.float32),
        num_slots=counted_rows.num_slots,
        anew=_known_tokens(anew, counted_rows) if anew else None,
    )


def _known_tokens(reqs: Sequence[Req], counted_rows: CountedRows) -> KnownTokens[np.ndarray]:
    slots, num_ids = [counted_rows.slot(req) for req in reqs], [len(req.ids) for req in reqs]
    return KnownTokens(
        slots_A=np.array(slots, dtype=np.int64),
        token_slots_N=np.repeat(np.array(slots, dtype=np.int64), num_ids),
        token_ids_N=np.concatenate([np.array(req.ids, dtype=np.int64) for req in reqs]),
        in_output_N=np.concatenate([np.arange(len(req.ids)) >= req.num_input_ids for req in reqs]).astype(
            np.int32
        ),
    )


def _biases(params: Sequence[SamplingParams]) -> BiasInputs[np.ndarray] | None:
    biases = [(i, bias.token_id, bias.bias) for i, p in enumerate(params) for bias in p.logit_bias]
    if not biases:
        return None
    entries, token_ids, values = zip(*biases, strict=True)
    return BiasInputs(
        entries_N=np.array(entries, dtype=np.int64),
        token_ids_N=np.array(token_ids, dtype=np.int64),
        values_N=np.array(values, dtype=np.float32),
    )


def _output_logprobs(params: Sequence[SamplingParams]) -> LogprobInputs[np.ndarray] | None:
    shares = [(i, 1, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
    return _logprobs([i for i, _, _ in shares], None, shares) if shares else None


def _logprobs(
    rows: Sequence[int], targets: Sequence[int] | None, shares: Sequence[tuple[int, int, LogprobParams]]
) -> LogprobInputs[np.ndarray]:
    most_ids = max(len(wanted.token_ids) for _, _, wanted in shares)
    token_ids = np.zeros((len(rows), most_ids), dtype=np.int64)
    at = 0
    for _, num_rows, wanted in shares:
        token_ids[at : at + num_rows, : len(wanted.token_ids)] = wanted.token_ids
        at += num_rows
    return LogprobInputs(
        rows_N=np.array(rows, dtype=np.int64),
        targets_N=None if targets is None else np.array(targets, dtype=np.int64),
        token_ids_NM=token_ids,
        top_num=max(wanted.top_num for _, _, wanted in shares),
        shares=tuple(LogprobShare(b, n, w.top_num, len(w.token_ids)) for b, n, w in shares),
    )


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """A number in [0, 1) for each pair, which depends on that only: two rounds of SplitMix64 (Steele et al. 2014)."""
    x = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    x = _mix(x + np.uint64(0x9E3779B97F4A7C15))
    x = _mix(x ^ ((np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)))
    return (x >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
