"""Attention over the KV pool, as the decoder calls it: write the new K and V, then attend."""

from __future__ import annotations

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.kernels.reference import decode_attention, extend_attention, write_kv
from shared.kvcache.pools import TokenToKVPool
from shared.model.decoder import Attend


class Progress:
    """Counts layers computed and steps planned, so that silence can be told from a long forward.

    Written by the forward stream and the scheduler, read by the control thread; a lost increment does no harm.
    """

    def __init__(self) -> None:
        self.count = 0


def make_attend(batch: ForwardBatch, pool: TokenToKVPool, progress: Progress) -> Attend:
    """Attention for one forward."""

    def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        progress.count += 1
        k_pages, v_pages = pool.layer_kv(layer)
        write_kv(k_pages, v_pages, k_TKD, v_TKD, batch.out_pages_T, batch.out_offsets_T)
        if batch.is_extend:
            return extend_attention(q_THD, k_pages, v_pages, batch.page_table_BP, batch.starts, batch.lengths)
        return decode_attention(q_THD, k_pages, v_pages, batch.page_table_BP, batch.seq_lens_B)

    return attend
