"""The two halves of a forward, on the forward stream: inputs and model, then sampling and FutureMap.

What computes them is a backend, chosen once when the engine is built.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from shared.engine.future_map import FutureMap
from shared.engine.logprobs import GatheredLogprobs, RawLogprobs, prompt_logprobs
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.penalties import Penalize, PenaltyTable
from shared.engine.profiler import Span
from shared.engine.sampling_inputs import Arrays, HostSampling, SamplingInputs, VocabMask
from shared.engine.uploads import StartCopy, Uploads, start_copy_to
from shared.scheduling.commit import Sampled


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward before it has sampled: float32 logits [S, V] on the device (None when nothing samples)."""

    logits_SV: torch.Tensor | None
    rows_S: torch.Tensor
    """The row of each sequence that samples, int64 on the device."""
    sampling: HostSampling
    hidden_ND: torch.Tensor | None = None
    """Hidden states of the prompt tokens whose logprobs are wanted, on the device; None when there are none."""


@dataclass(frozen=True, slots=True)
class SampledTensors(Arrays[torch.Tensor]):
    """What a forward has sampled, int64 [S], and the logprobs that were asked for; on one device."""

    token_ids_S: torch.Tensor
    logprobs: GatheredLogprobs | None = None
    input_logprobs: GatheredLogprobs | None = None

    def as_values(self) -> Sampled:
        """The same as values. The tensors must be on the host."""
        return Sampled(
            self.token_ids_S.tolist(),
            self.logprobs.by_owner() if self.logprobs else {},
            self.input_logprobs.by_owner() if self.input_logprobs else {},
        )


class ModelBackend(Protocol):
    """Reads the model's weights, reads and writes the KV pool. Used on the forward stream, in launch order."""

    name: str
    numerics: str
    """The same for two backends whose KV and logits have the same bits, given one type (`KVLayout.numerics`)."""
    is_exact: bool
    """True if the K, V and logits of a token have the same bits whatever forward computed them (ADR 27)."""
    has_threads: bool
    """True for threads of its own, of which the forward stream's is the first; torch starts its own by itself."""
    vocab_size: int

    def forward(self, batch: ModelWorkerBatch, future_map: FutureMap) -> Forwarded:
        """Compute `batch`. What it returns is good until the next forward."""
        ...

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The logits of hidden states that a forward returned, float32 [N, V]."""
        ...

    @property
    def penalize(self) -> Penalize:
        """What penalizes logits by counted tokens."""
        ...

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs[torch.Tensor],
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        """The next token of each row, int64 [S], which enters the FutureMap. The logits may be overwritten."""
        ...

    def measure_graphs(self, future_map: FutureMap) -> int:
        """Estimate how many bytes of the device `capture_graphs` takes. Nothing of it is left on return."""
        ...

    def capture_graphs(self, future_map: FutureMap) -> None:
        """Record what later forwards replay, if the backend does so. Called once, before the first forward."""
        ...

    def close(self) -> None:
        """Let go of threads and memory. Nothing runs."""
        ...


class ModelRunner:
    """Owns the FutureMap and the PenaltyTable. It knows rows, not requests."""

    def __init__(
        self,
        backend: ModelBackend,
        num_rows: int,
        device: torch.device,
        span: Span = nullcontext,
        start_copy: StartCopy | None = None,
    ) -> None:
        self._backend = backend
        self._future_map = FutureMap(num_rows, device)
        self._penalties = PenaltyTable(backend.vocab_size, device, backend.penalize)
        start_copy = start_copy or start_copy_to(device)
        self._uploads = Uploads(device, start_copy) if start_copy is not None else None
        self._span = span
        self.device = device

    @torch.inference_mode()
    def measure_graphs(self) -> int:
        """Estimate how many bytes of the device `capture_graphs` takes, for what a KV pool may leave."""
        return self._backend.measure_graphs(self._future_map)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Record what later forwards replay. Called before the first forward; KV is written to page 0 alone."""
        self._backend.capture_graphs(self._future_map)

    @torch.inference_mode()
    def forward(self, batch: ModelWorkerBatch) -> Forwarded:
        """Compute `batch` up to the logits of its S sampling sequences."""
        with self._span("forward"):
            return self._backend.forward(batch, self._future_map)

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded, vocab_mask: VocabMask[np.ndarray] | None = None) -> SampledTensors:
        """Draw the next token of each sampling sequence, on the device; the next forward reads them."""
        with self._span("sample"):
            asked_for = forwarded.sampling
            if vocab_mask is not None:
                asked_for = replace(asked_for, vocab_mask=vocab_mask)
            return self._sample(forwarded, upload_sampling(asked_for, self._uploads))

    def close(self) -> None:
        """Let go of the backend's threads and memory. Nothing runs."""
        self._backend.close()

    def _sample(self, forwarded: Forwarded, inputs: SamplingInputs[torch.Tensor]) -> SampledTensors:
        logits_SV, logprobs = forwarded.logits_SV, None
        if logits_SV is None:
            token_ids_S = torch.empty(0, dtype=torch.int64, device=self.device)
        else:
            raw = RawLogprobs.of(logits_SV, inputs.logprobs) if inputs.logprobs is not None else None
            if inputs.penalties is not None:
                self._penalties.apply(logits_SV, inputs.penalties)
            token_ids_S = self._backend.draw(logits_SV, inputs, forwarded.rows_S, self._future_map)
            if inputs.penalties is not None:
                self._penalties.count(token_ids_S, inputs.penalties)
            logprobs = raw.gather(token_ids_S) if raw is not None else None
        of_prompt = None
        if inputs.input_logprobs is not None:
            assert forwarded.hidden_ND is not None, "the forward has computed these tokens"
            backend = self._backend
            of_prompt = prompt_logprobs(
                backend.logits, forwarded.hidden_ND, inputs.input_logprobs, backend.vocab_size
            )
        return SampledTensors(token_ids_S, logprobs, of_prompt)


def upload_sampling(inputs: HostSampling, uploads: Uploads | None) -> SamplingInputs[torch.Tensor]:
    """The same on the device, where it arrives in one copy; on a CPU (no `uploads`) it is there."""
    if uploads is None:
        there: SamplingInputs[torch.Tensor] = inputs.map(torch.from_numpy)
        return there
    arrays: list[np.ndarray] = []
    inputs.map(arrays.append)
    if not arrays:
        return SamplingInputs()
    tensors = iter(uploads.send(arrays))
    on_device: SamplingInputs[torch.Tensor] = inputs.map(lambda _: next(tensors))
    return on_device
