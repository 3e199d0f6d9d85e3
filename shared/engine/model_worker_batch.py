"""The frozen snapshot of a scheduling decision that crosses to the forward stream: values only, no shared objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.collect_sampling import CountedRows, input_logprobs, sampling_inputs
from shared.engine.sampling_inputs import HostSampling
from shared.kvcache.pools import ReqToTokenPool
from shared.kvcache.windows import WindowPages
from shared.scheduling.plan import ScheduleBatch


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
        sampling=sampling_inputs(
            [items[i] for i in sampled],
            eos_token_ids,
            counted_rows or CountedRows(),
            input_logprobs(batch.extends),
        ),
        future_writes=tuple(future_writes),
        window_table_BP=None if windows is None else windows.of_page[table_BP],
    )
