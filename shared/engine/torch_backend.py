"""The model by torch operations, on any device and in any type."""

from __future__ import annotations

import torch

from shared.engine.attention import Progress, make_attend
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap, to_device
from shared.engine.logprobs import GatheredLogprobs, prompt_logprobs
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampler import sample
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.vocab_mask import VocabMask
from shared.kvcache.pools import TokenToKVPool
from shared.model.decoder import Decoder


class TorchBackend:
    """See ModelBackend."""

    name = "torch"
    has_threads = False

    def __init__(self, decoder: Decoder, pool: TokenToKVPool, progress: Progress) -> None:
        self.vocab_size = decoder.config.vocab_size
        self._decoder = decoder
        self._pool = pool
        self._progress = progress

    def forward(
        self, batch: ModelWorkerBatch, future_map: FutureMap
    ) -> tuple[torch.Tensor | None, GatheredLogprobs | None]:
        """See ModelBackend."""
        fb = ForwardBatch.from_model_worker_batch(batch, future_map, self._pool.page_size, self._pool.device)
        attend = make_attend(fb, self._pool, self._progress)
        hidden_TD = self._decoder.forward(fb.input_ids_T, fb.positions_T, attend)
        logits_SV = self._decoder.logits(hidden_TD[fb.last_token_S]) if len(fb.last_token_S) else None
        wanted = batch.input_logprobs
        if wanted is None:
            return logits_SV, None
        hidden_ND = hidden_TD[to_device(wanted.rows_N, self._pool.device)]
        return logits_SV, prompt_logprobs(self._decoder.logits, hidden_ND, wanted, self.vocab_size)

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs,
        vocab_mask: VocabMask | None,
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        """See ModelBackend."""
        token_ids_S = sample(logits_SV, inputs, vocab_mask)
        future_map.store(rows_S, token_ids_S)
        return token_ids_S

    def close(self) -> None:
        """See ModelBackend."""
