"""One forward, start to end, on the forward stream: inputs, model, sampling, FutureMap."""

from __future__ import annotations

import torch

from shared.engine.attention import Progress, make_attend
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampler import sample
from shared.kvcache.pools import TokenToKVPool
from shared.model.decoder import Decoder


class ModelRunner:
    """Owns the FutureMap; reads the model's weights and reads and writes the KV pool. Keeps no request state."""

    def __init__(self, decoder: Decoder, pool: TokenToKVPool, num_rows: int, progress: Progress) -> None:
        self._decoder = decoder
        self._pool = pool
        self._future_map = FutureMap(num_rows, pool.device)
        self._progress = progress
        self.device = pool.device

    @torch.inference_mode()
    def forward(self, batch: ModelWorkerBatch) -> torch.Tensor:
        """Compute `batch` and return the tokens that its S sampling sequences drew, int64 [S], on the device."""
        fb = ForwardBatch.from_model_worker_batch(batch, self._future_map, self._pool.page_size, self.device)
        attend = make_attend(fb, self._pool, self._progress)
        hidden_TD = self._decoder.forward(fb.input_ids_T, fb.positions_T, attend)
        if len(fb.rows_S) == 0:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        token_ids_S = sample(self._decoder.logits(hidden_TD[fb.last_token_S]), batch.sampling)
        self._future_map.store(fb.rows_S, token_ids_S)
        return token_ids_S
