"""What the model computes on: device tensors, born once and complete at forward entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.engine.input_block import BlockShape, FilledBlock
from shared.engine.model_worker_batch import ModelWorkerBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """B sequences with T new tokens, of which S sequences sample. Extends come first, then the decode step.

    All tensors are views of the input block. Those of a forward that is captured have the shape of its bucket: it is
    captured for a padding batch, and what it reads of later ones are its padded tensors and the words of the block.
    """

    host: ModelWorkerBatch
    """The snapshot that all of this was made from, for what is planned on the host."""
    shape: BlockShape
    words: torch.Tensor
    """The whole block as int32, for kernels that find the page table and their work by its header."""
    input_ids_T: torch.Tensor
    """-1 - row stands for the last sampled token of a row, which the host need not know."""
    positions_T: torch.Tensor
    out_pages_T: torch.Tensor
    out_window_pages_T: torch.Tensor
    """Those of layers with windows. They differ where these have a pool of their own."""
    out_offsets_T: torch.Tensor
    """Where each new token's K and V go: a page, and an offset in it (together SGLang's out_cache_loc)."""
    hidden_rows_T: torch.Tensor
    """Indices in T of the tokens whose prompt logprobs are wanted, padded to T."""
    future_rows_B: torch.Tensor
    future_tokens_B: torch.Tensor
    """The tokens that enter the FutureMap before it is read, padded to B."""
    page_table_BP: torch.Tensor
    window_table_BP: torch.Tensor
    """Of layers with windows. Page tables are int32; everything else is int64."""
    seq_lens_B: torch.Tensor
    rows_S: torch.Tensor
    """The row of each sequence that samples (SGLang's req_pool_indices)."""
    last_token_S: torch.Tensor
    """Index in T of the last token of each sequence that samples."""

    @classmethod
    def from_model_worker_batch(cls, batch: ModelWorkerBatch, block: FilledBlock) -> ForwardBatch:
        """The views of `block`, which was filled from `batch`."""
        ids_T, positions_T, pages_T, window_pages_T, offsets_T, hidden_rows_T = block.per_token()
        future_rows_B, future_tokens_B, seq_lens_B, rows_B, last_tokens_B = block.per_sequence()
        table_BP, window_table_BP = block.page_tables(batch)
        num_sampled = len(batch.sampled_B)
        return cls(
            host=batch,
            shape=block.shape,
            words=block.words,
            input_ids_T=ids_T,
            positions_T=positions_T,
            out_pages_T=pages_T,
            out_window_pages_T=window_pages_T,
            out_offsets_T=offsets_T,
            hidden_rows_T=hidden_rows_T,
            future_rows_B=future_rows_B,
            future_tokens_B=future_tokens_B,
            page_table_BP=table_BP,
            window_table_BP=window_table_BP,
            seq_lens_B=seq_lens_B,
            rows_S=rows_B[:num_sampled],
            last_token_S=last_tokens_B[:num_sampled],
        )
