"""The two halves of a forward, on the forward stream: inputs and model, then sampling and FutureMap."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.engine.attention import Progress, make_attend
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.model_worker_batch import ModelWorkerBatch, SamplingInputs
from shared.engine.sampler import sample
from shared.kvcache.pools import TokenToKVPool
from shared.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward before it has sampled: float32 logits [S, V] on the device (None when nothing samples)."""

    logits_SV: torch.Tensor | None
    rows_S: torch.Tensor
    sampling: SamplingInputs


class ModelRunner:
    """Owns the FutureMap; reads the model's weights and reads and writes the KV pool. Keeps no request state."""

    def __init__(self, decoder: Decoder, pool: TokenToKVPool, num_rows: int, progress: Progress) -> None:
        self._decoder = decoder
        self._pool = pool
        self._future_map = FutureMap(num_rows, pool.device)
        self._progress = progress
        self.device = pool.device

    @torch.inference_mode()
    def forward(self, batch: ModelWorkerBatch) -> Forwarded:
        """Compute `batch` up to the logits of its S sampling sequences."""
        fb = ForwardBatch.from_model_worker_batch(batch, self._future_map, self._pool.page_size, self.device)
        attend = make_attend(fb, self._pool, self._progress)
        hidden_TD = self._decoder.forward(fb.input_ids_T, fb.positions_T, attend)
        logits_SV = self._decoder.logits(hidden_TD[fb.last_token_S]) if len(fb.rows_S) else None
        return Forwarded(logits_SV, fb.rows_S, batch.sampling)

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded) -> torch.Tensor:
        """Draw the next token of each sampling sequence, int64 [S], on the device; the next forward reads them."""
        if forwarded.logits_SV is None:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        token_ids_S = sample(forwarded.logits_SV, forwarded.sampling)
        self._future_map.store(forwarded.rows_S, token_ids_S)
        return token_ids_S
