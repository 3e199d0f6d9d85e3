"""The two halves of a forward, on the forward stream: inputs and model, then sampling and FutureMap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from shared.engine.attention import Progress, make_attend
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.logprobs import GatheredLogprobs, RawLogprobs, prompt_logprobs
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.penalties import PenaltyTable
from shared.engine.profiler import Span
from shared.engine.sampler import sample
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.vocab_mask import VocabMask
from shared.kvcache.pools import TokenToKVPool
from shared.model.decoder import Decoder
from shared.scheduling.sampled import Sampled


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward before it has sampled: float32 logits [S, V] on the device (None when nothing samples)."""

    logits_SV: torch.Tensor | None
    rows_S: torch.Tensor
    sampling: SamplingInputs
    input_logprobs: GatheredLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """What a forward has sampled, int64 [S], and the logprobs that were asked for; on one device."""

    token_ids_S: torch.Tensor
    logprobs: GatheredLogprobs | None = None
    input_logprobs: GatheredLogprobs | None = None

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> SampledTensors:
        """Every tensor replaced by `move` of it."""
        return SampledTensors(
            move(self.token_ids_S),
            self.logprobs and self.logprobs.map(move),
            self.input_logprobs and self.input_logprobs.map(move),
        )

    def as_values(self) -> Sampled:
        """The same as values. The tensors must be on the host."""
        return Sampled(
            self.token_ids_S.tolist(),
            self.logprobs.by_owner() if self.logprobs else {},
            self.input_logprobs.by_owner() if self.input_logprobs else {},
        )


class ModelRunner:
    """Owns the FutureMap and the PenaltyTable; reads the model's weights, reads and writes the KV pool.

    It knows rows, not requests.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: TokenToKVPool,
        num_rows: int,
        progress: Progress,
        span: Span = nullcontext,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._future_map = FutureMap(num_rows, pool.device)
        self._penalties = PenaltyTable(decoder.config.vocab_size, pool.device)
        self._progress = progress
        self._span = span
        self.device = pool.device

    @torch.inference_mode()
    def forward(self, batch: ModelWorkerBatch) -> Forwarded:
        """Compute `batch` up to the logits of its S sampling sequences."""
        with self._span("forward"):
            return self._forward(batch)

    def _forward(self, batch: ModelWorkerBatch) -> Forwarded:
        fb = ForwardBatch.from_model_worker_batch(batch, self._future_map, self._pool.page_size, self.device)
        attend = make_attend(fb, self._pool, self._progress)
        hidden_TD = self._decoder.forward(fb.input_ids_T, fb.positions_T, attend)
        logits_SV = self._decoder.logits(hidden_TD[fb.last_token_S]) if len(fb.rows_S) else None
        of_prompt = None
        if batch.input_logprobs is not None:
            of_prompt = prompt_logprobs(
                self._decoder.logits, hidden_TD, batch.input_logprobs, self._decoder.config.vocab_size
            )
        return Forwarded(logits_SV, fb.rows_S, batch.sampling, of_prompt)

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded, vocab_mask: VocabMask | None = None) -> SampledTensors:
        """Draw the next token of each sampling sequence, on the device; the next forward reads them."""
        with self._span("sample"):
            return self._sample(forwarded, vocab_mask)

    def _sample(self, forwarded: Forwarded, vocab_mask: VocabMask | None) -> SampledTensors:
        logits_SV, inputs = forwarded.logits_SV, forwarded.sampling
        if logits_SV is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return SampledTensors(nothing, None, forwarded.input_logprobs)
        raw = RawLogprobs.of(logits_SV, inputs.logprobs) if inputs.logprobs is not None else None
        if inputs.penalties is not None:
            self._penalties.apply(logits_SV, inputs.penalties)
        token_ids_S = sample(logits_SV, inputs, vocab_mask)
        if inputs.penalties is not None:
            self._penalties.count(token_ids_S, inputs.penalties)
        self._future_map.store(forwarded.rows_S, token_ids_S)
        logprobs = raw.gather(token_ids_S) if raw is not None else None
        return SampledTensors(token_ids_S, logprobs, forwarded.input_logprobs)
