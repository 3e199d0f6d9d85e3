"""The attention backend of Triton's kernels, for CUDA GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.input_block import BlockShape
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.kernels.triton.attention import PagedAttention
from shared.kernels.triton.attention_work import attention_work, has_merges, most_words


@dataclass(frozen=True, slots=True)
class TritonAttentionPlan:
    """Attention of each forward that is in the block `words` when the plan runs."""

    kernels: PagedAttention
    words: torch.Tensor
    may_cut: bool
    """False if no tile of these forwards is cut."""

    def run(
        self,
        q_THD: torch.Tensor,
        k_pages_NKSD: torch.Tensor,
        v_pages_NKSD: torch.Tensor,
        window: int | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Two launches, or one where nothing is cut."""
        return self.kernels(
            q_THD,
            k_pages_NKSD,
            v_pages_NKSD,
            self.words,
            window=window,
            sinks_H=sinks_H,
            may_cut=self.may_cut,
        )


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """Plans a forward by listing its work (`AttentionWork`), in one pass of numpy over its sequences."""

    kernels: PagedAttention
    capturable = True

    def work(self, batch: ModelWorkerBatch) -> np.ndarray:
        """Items and merges."""
        return attention_work(
            batch.starts_B,
            batch.lengths_B,
            group=self.kernels.group,
            num_kv_heads=self.kernels.num_kv_heads,
            block_m=self.kernels.block_m,
            split=self.kernels.split,
            num_programs=self.kernels.num_programs,
            workspace_rows=self.kernels.workspace_rows,
        ).words()

    def max_work_words(self, shape: BlockShape, context_length: int) -> int:
        """As if every tile saw the whole context, and were cut as far as the workspace allows."""
        return most_words(
            shape.num_tokens,
            shape.num_sequences,
            group=self.kernels.group,
            block_m=self.kernels.block_m,
            split=self.kernels.split,
            context_length=context_length,
            workspace_rows=self.kernels.workspace_rows,
        )

    def is_cut(self, work: np.ndarray) -> bool:
        """Whether it has merges."""
        return has_merges(work)

    def plan(self, batch: ForwardBatch, *, may_cut: bool) -> TritonAttentionPlan:
        """Everything else is in the block."""
        return TritonAttentionPlan(self.kernels, batch.words, may_cut)
