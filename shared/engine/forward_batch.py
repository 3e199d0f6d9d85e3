"""What the model computes on: device tensors, born once and complete at forward entry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.future_map import FutureMap
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.on_device import packed_to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """B sequences with T new tokens, of which S sequences sample. Extends come first, then the decode step.

    All tensors but `input_ids_T` are views of one block that a single copy brings to the device.
    """

    host: ModelWorkerBatch
    """The snapshot that all of this was made from, for what is planned on the host."""
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    out_pages_T: torch.Tensor
    out_offsets_T: torch.Tensor
    """Where each new token's K and V go: a page, and an offset in it (together SGLang's out_cache_loc)."""
    page_table_BP: torch.Tensor
    """int32; everything else is int64."""
    seq_lens_B: torch.Tensor
    rows_S: torch.Tensor
    """The row of each sequence that samples (SGLang's req_pool_indices)."""
    last_token_S: torch.Tensor
    """Index in T of the last token of each sequence that samples."""
    hidden_rows_N: torch.Tensor
    """Indices in T of the tokens whose prompt logprobs are wanted."""

    @classmethod
    def from_model_worker_batch(
        cls, batch: ModelWorkerBatch, future_map: FutureMap, page_size: int, device: torch.device
    ) -> ForwardBatch:
        """Copy the snapshot to the device, write to the FutureMap what the batch brings, and read it.

        Runs on the forward stream, behind the sampling of all forwards before. The future writes enter the
        FutureMap first, then the inputs of the decode step are read from it.
        """
        ends = np.cumsum(batch.lengths_B)
        sequence_T = np.repeat(np.arange(len(batch.rows_B)), batch.lengths_B)
        positions_T = np.arange(ends[-1]) - np.repeat(ends - batch.lengths_B, batch.lengths_B)
        positions_T += np.repeat(batch.starts_B, batch.lengths_B)
        wanted = batch.input_logprobs
        views = packed_to_device(
            {
                "input_ids": batch.input_ids,
                "future_writes": np.array(batch.future_writes, dtype=np.int64).reshape(-1, 2).T,
                "decode_rows": batch.rows_B[len(batch.rows_B) - batch.num_decodes :],
                "positions_T": positions_T,
                "out_pages_T": batch.page_table_BP[sequence_T, positions_T // page_size].astype(np.int64),
                "out_offsets_T": positions_T % page_size,
                "page_table_BP": batch.page_table_BP,
                "seq_lens_B": batch.starts_B + batch.lengths_B,
                "rows_S": batch.rows_B[batch.sampled_B],
                "last_token_S": ends[batch.sampled_B] - 1,
                "hidden_rows_N": wanted.rows_N if wanted is not None else np.empty(0, dtype=np.int64),
            },
            device,
        )
        input_ids_T, writes, decode_rows = (
            views.pop(name) for name in ("input_ids", "future_writes", "decode_rows")
        )
        if batch.future_writes:
            future_map.store(writes[0], writes[1])
        if batch.num_decodes:
            input_ids_T = torch.cat([input_ids_T, future_map.load(decode_rows)])
        return cls(host=batch, input_ids_T=input_ids_T, **views)
