"""The attention backend: how each token of a forward attends to the pages of its sequence.

A backend plans once a forward, when lengths and page tables are known, and its plan runs once a layer. What it plans
on the host travels to the device in the forward's input block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.input_block import BlockShape
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.kernels.reference import decode_attention, extend_attention


class AttentionPlan(Protocol):
    """Attention of one forward."""

    def run(
        self,
        q_THD: torch.Tensor,
        k_pages_NKSD: torch.Tensor,
        v_pages_NKSD: torch.Tensor,
        window: int | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention over one layer's pages, [T, H, D]; the K and V of the new tokens are in them already.

        `window` and `sinks_H` are the layer's: None where a token sees its whole sequence, and without sinks.
        """
        ...


class AttentionBackend(Protocol):
    """Used on the forward stream, one forward after the other."""

    capturable: bool
    """True if a plan's `run` can be captured in a CUDA graph: it finds the work of later forwards in the block."""

    def work(self, batch: ModelWorkerBatch) -> np.ndarray:
        """The half of the plan that is made on the host, int32 [N]: the last part of the block (`Header.WORK`)."""
        ...

    def max_work_words(self, shape: BlockShape, context_length: int) -> int:
        """The most words of `work` for a batch that fits into `shape`, so that the block has room for them."""
        ...

    def is_cut(self, work: np.ndarray) -> bool:
        """Whether parts of this work are computed apart, so that a plan has to merge them."""
        ...

    def plan(self, batch: ForwardBatch, *, may_cut: bool) -> AttentionPlan:
        """What every layer of the forward shares. `batch.host` has lengths on the host, so nothing need wait.

        Without `may_cut` the plan serves only forwards whose work is not cut. A plan that is captured serves all
        later forwards of the shape, so it must not depend on `batch.host`. Its output for padding may be anything.
        """
        ...


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    """Extends one by one, and the decode step beside them in one call over a padded page table.

    Layers with windows have page tables of their own, which are the same where they have no pool of their own.
    """

    starts: list[int]
    lengths: list[int]
    """Both of the extends (SGLang's extend_prefix_lens and extend_seq_lens)."""
    num_extend_tokens: int
    tables_BP: torch.Tensor
    window_tables_BP: torch.Tensor
    decode_seq_lens_B: torch.Tensor

    def run(
        self,
        q_THD: torch.Tensor,
        k_pages_NKSD: torch.Tensor,
        v_pages_NKSD: torch.Tensor,
        window: int | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Extends and decode step, each by the kernel made for it."""
        pages, sees = (k_pages_NKSD, v_pages_NKSD), (window, sinks_H)
        tables_BP = self.tables_BP if window is None else self.window_tables_BP
        extends_BP, decodes_BP = tables_BP[: len(self.lengths)], tables_BP[len(self.lengths) :]
        if not self.lengths:
            return decode_attention(q_THD, *pages, decodes_BP, self.decode_seq_lens_B, *sees)
        num = self.num_extend_tokens
        extended = extend_attention(q_THD[:num], *pages, extends_BP, self.starts, self.lengths, *sees)
        if num == len(q_THD):
            return extended
        decoded = decode_attention(q_THD[num:], *pages, decodes_BP, self.decode_seq_lens_B, *sees)
        return torch.cat([extended, decoded])


class TorchAttention:
    """Torch operations, on any device and in any type. Their shapes depend on lengths, so no graph can have them."""

    capturable = False

    def work(self, batch: ModelWorkerBatch) -> np.ndarray:
        """Nothing: `plan` reads the snapshot."""
        return _NO_WORK

    def max_work_words(self, shape: BlockShape, context_length: int) -> int:
        """None."""
        return 0

    def is_cut(self, work: np.ndarray) -> bool:
        """Never."""
        return False

    def plan(self, batch: ForwardBatch, *, may_cut: bool) -> TorchAttentionPlan:
        """Split the batch into its extends and its decode step."""
        num_extends = len(batch.host.rows_B) - batch.host.num_decodes
        lengths = batch.host.lengths_B[:num_extends].tolist()
        # Indexing would make int64 of them twice a layer.
        tables_BP, window_tables_BP = batch.page_table_BP.long(), batch.window_table_BP.long()
        return TorchAttentionPlan(
            starts=batch.host.starts_B[:num_extends].tolist(),
            lengths=lengths,
            num_extend_tokens=sum(lengths),
            tables_BP=tables_BP,
            window_tables_BP=window_tables_BP,
            decode_seq_lens_B=batch.seq_lens_B[num_extends:],
        )


_NO_WORK = np.empty(0, dtype=np.int32)
