"""The model by torch operations, on any device and in any type."""

from __future__ import annotations

from functools import partial

import torch

from shared.engine.attention import AttentionBackend
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.logprobs import prompt_logprobs
from shared.engine.model_runner import Forwarded
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.progress import Progress
from shared.engine.sampler import sample
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.torch_ops import TorchOps
from shared.engine.vocab_mask import VocabMask
from shared.kvcache.pools import TokenToKVPool
from shared.model.decoder import Decoder


class TorchBackend:
    """A ModelBackend made of the decoder, the torch operations and an attention backend."""

    has_threads = False

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        attention: AttentionBackend,
        pool: TokenToKVPool,
        progress: Progress,
    ) -> None:
        self.name = name
        self.numerics = f"{name}-{torch.__version__}/{_processor(pool.device)}"
        self.vocab_size = decoder.config.vocab_size
        self._decoder = decoder
        self._attention = attention
        self._pool = pool
        self._kv_NKSD = [pool.layer_kv(layer) for layer in range(pool.num_layers)]
        self._progress = progress

    def forward(self, batch: ModelWorkerBatch, future_map: FutureMap) -> Forwarded:
        """Copy the batch to the device, plan attention for it, and go through the layers."""
        fb = ForwardBatch.from_model_worker_batch(batch, future_map, self._pool.page_size, self._pool.device)
        ops = TorchOps(fb, self._attention.plan(fb), self._kv_NKSD, self._progress)
        logits = partial(self._decoder.logits, ops=ops)
        hidden_TD = self._decoder.forward(fb.input_ids_T, fb.positions_T, ops)
        logits_SV = logits(hidden_TD[fb.last_token_S]) if len(fb.last_token_S) else None
        of_prompt = None
        if batch.input_logprobs is not None:
            hidden_ND = hidden_TD[fb.hidden_rows_N]
            of_prompt = prompt_logprobs(logits, hidden_ND, batch.input_logprobs, self.vocab_size)
        return Forwarded(logits_SV, fb.rows_S, batch.sampling, of_prompt)

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs,
        vocab_mask: VocabMask | None,
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        """Draw by torch operations."""
        token_ids_S = sample(logits_SV, inputs, vocab_mask)
        future_map.store(rows_S, token_ids_S)
        return token_ids_S

    def close(self) -> None:
        """Do nothing: torch frees its memory."""


def _processor(device: torch.device) -> str:
    """The GPU's name, or the instruction set that torch computes with on this CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
