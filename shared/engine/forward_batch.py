"""What the model computes on: device tensors, born once and complete at forward entry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.future_map import FutureMap, resolve_forward_inputs, to_device
from shared.engine.model_worker_batch import ModelWorkerBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """B sequences, T new tokens. Sequence b computes tokens [starts[b], starts[b] + lengths[b]) of itself."""

    num_decodes: int
    """The last sequences; each computes one token. Those before them are extends."""
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    out_pages_T: torch.Tensor
    out_offsets_T: torch.Tensor
    """Where each new token's K and V go: a page, and an offset in it (together SGLang's out_cache_loc)."""
    page_table_BP: torch.Tensor
    seq_lens_B: torch.Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    last_token_S: torch.Tensor
    """Index in T of the last token of each sequence that samples."""

    @classmethod
    def from_model_worker_batch(
        cls, batch: ModelWorkerBatch, future_map: FutureMap, page_size: int, device: torch.device
    ) -> ForwardBatch:
        """Copy the snapshot to the device. Runs on the forward stream."""
        ends = np.cumsum(batch.lengths_B)
        sequence_T = np.repeat(np.arange(len(batch.rows_B)), batch.lengths_B)
        positions = np.arange(ends[-1]) - np.repeat(ends - batch.lengths_B, batch.lengths_B)
        positions += np.repeat(batch.starts_B, batch.lengths_B)
        return cls(
            num_decodes=batch.num_decodes,
            input_ids_T=resolve_forward_inputs(batch, future_map, device),
            positions_T=to_device(positions, device),
            out_pages_T=to_device(batch.page_table_BP[sequence_T, positions // page_size], device),
            out_offsets_T=to_device(positions % page_size, device),
            page_table_BP=to_device(batch.page_table_BP, device),
            seq_lens_B=to_device(batch.starts_B + batch.lengths_B, device),
            starts=tuple(batch.starts_B.tolist()),
            lengths=tuple(batch.lengths_B.tolist()),
            last_token_S=to_device(ends[batch.sampled_B] - 1, device),
        )
