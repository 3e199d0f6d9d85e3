"""The frozen snapshot of a scheduling decision that crosses to the forward stream: values only, no shared objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.kvcache.pools import ReqToTokenPool
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.schedule_batch import ScheduleBatch, ScheduledReq


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingInputs:
    """Parameters of the S sequences that sample in this forward, as host arrays of length S.

    `uniforms` in [0, 1) is what randomness there is: a function of (seed, output position) alone.
    `masked_ids[i]` may not be sampled by sequence i (stop tokens before `min_new_tokens`).
    """

    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray
    uniforms: np.ndarray
    masked_ids: tuple[tuple[int, ...], ...]
    all_greedy: bool
    needs_filter: bool
    """True when any sequence uses top-k, top-p or min-p."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWorkerBatch:
    """B sequences with T tokens in all.

    An extend carries its prompt tokens in `input_ids_T`; a decode step carries none: it reads the last sampled
    token of `rows_B` from the FutureMap. `future_writes` are (row, token) pairs that arrived from prefill nodes
    and enter the FutureMap before this forward reads it. `sampled_B` lists which sequences sample.
    """

    is_extend: bool
    input_ids_T: np.ndarray
    rows_B: np.ndarray
    starts_B: np.ndarray
    lengths_B: np.ndarray
    page_table_BP: np.ndarray
    sampled_B: np.ndarray
    sampling: SamplingInputs
    future_writes: tuple[tuple[int, int], ...]


def snapshot(
    batch: ScheduleBatch,
    rows: ReqToTokenPool,
    future_writes: Sequence[tuple[int, int]],
    eos_token_ids: frozenset[int],
) -> ModelWorkerBatch:
    """Copy what the forward needs out of the scheduler's own, still changing, state."""
    items = batch.items
    kvs = [item.req.kv for item in items]
    row_ids = np.array([kv.row for kv in kvs if kv is not None], dtype=np.int64)
    assert len(row_ids) == len(items), "a scheduled request holds KV"
    starts = np.array([item.start for item in items], dtype=np.int64)
    lengths = np.array([item.length for item in items], dtype=np.int64)
    num_pages = -(-int((starts + lengths).max()) // rows.page_size)
    input_ids: list[int] = []
    if batch.is_extend:
        for item in items:
            input_ids += item.req.ids[item.start : item.start + item.length]
    sampled = [i for i, item in enumerate(items) if item.position is not None]
    return ModelWorkerBatch(
        is_extend=batch.is_extend,
        input_ids_T=np.array(input_ids, dtype=np.int64),
        rows_B=row_ids,
        starts_B=starts,
        lengths_B=lengths,
        page_table_BP=rows.pages[row_ids, :num_pages],
        sampled_B=np.array(sampled, dtype=np.int64),
        sampling=_sampling_inputs([items[i] for i in sampled], eos_token_ids),
        future_writes=tuple(future_writes),
    )


def _sampling_inputs(items: Sequence[ScheduledReq], eos_token_ids: frozenset[int]) -> SamplingInputs:
    params = [item.req.params for item in items]
    positions = [item.position or 0 for item in items]
    return SamplingInputs(
        temperatures=np.array([0.0 if p.is_greedy else p.temperature for p in params], dtype=np.float32),
        top_ks=np.array([p.top_k for p in params], dtype=np.int64),
        top_ps=np.array([p.top_p for p in params], dtype=np.float32),
        min_ps=np.array([p.min_p for p in params], dtype=np.float32),
        uniforms=np.array(
            [uniform(p.seed, position) for p, position in zip(params, positions, strict=True)],
            dtype=np.float64,
        ),
        masked_ids=tuple(
            _masked_ids(p, position, eos_token_ids) for p, position in zip(params, positions, strict=True)
        ),
        all_greedy=all(p.is_greedy for p in params),
        needs_filter=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params if not p.is_greedy),
    )


def _masked_ids(params: SamplingParams, position: int, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    if position >= params.min_new_tokens:
        return ()
    eos = () if params.ignore_eos else sorted(eos_token_ids)
    return (*params.stop_token_ids, *eos)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: two rounds of SplitMix64 (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    x = _mix(((seed & mask) + 0x9E3779B97F4A7C15) & mask)
    x = _mix((x ^ ((position + 1) * 0xD1B54A32D192ED03)) & mask)
    return (x >> 11) * 2.0**-53


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
