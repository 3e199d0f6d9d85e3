"""Attention over the KV pool, as the decoder calls it: write the new K and V, then attend."""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.kernels.reference import decode_attention, extend_attention, write_kv
from shared.kvcache.pools import TokenToKVPool
from shared.model.decoder import Attend


class Progress:
    """Counts layers computed and steps planned, so that silence can be told from a long forward.

    The forward stream counts layers, the scheduler steps, and the control thread reads.
    """

    def __init__(self) -> None:
        self.layers = np.zeros(1, dtype=np.int64)
        """In memory, where native code finds it."""
        self.steps = 0

    @property
    def count(self) -> int:
        """Of both."""
        return int(self.layers[0]) + self.steps


def make_attend(batch: ForwardBatch, pool: TokenToKVPool, progress: Progress) -> Attend:
    """Attention for one forward; extends and a decode step beside them each by the kernel made for them."""
    num_extends = len(batch.lengths) - batch.num_decodes
    num_extend_tokens = sum(batch.lengths[:num_extends])

    def extend(q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        e = num_extends
        return extend_attention(
            q_THD, k_pages, v_pages, batch.page_table_BP[:e], batch.starts[:e], batch.lengths[:e]
        )

    def decode(q_BHD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        e = num_extends
        return decode_attention(q_BHD, k_pages, v_pages, batch.page_table_BP[e:], batch.seq_lens_B[e:])

    def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        progress.layers[0] += 1
        k_pages, v_pages = pool.layer_kv(layer)
        write_kv(k_pages, v_pages, k_TKD, v_TKD, batch.out_pages_T, batch.out_offsets_T)
        if batch.num_decodes == 0:
            return extend(q_THD, k_pages, v_pages)
        if num_extends == 0:
            return decode(q_THD, k_pages, v_pages)
        extended = extend(q_THD[:num_extend_tokens], k_pages, v_pages)
        return torch.cat([extended, decode(q_THD[num_extend_tokens:], k_pages, v_pages)])

    return attend
