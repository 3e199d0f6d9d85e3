"""The real forward and sampling on torch's `meta` device, which has shapes and no values.

An operation that needs a value on the host raises there, and so does one that mixes host and device. A GPU would wait
at the first kind, and fail at the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from shared.config import CacheOptions, ScheduleOptions
from shared.engine.cuda.batches import Extend, StartBatches
from shared.engine.engine_shape import EngineShape
from shared.engine.model_runner import ModelRunner, SampledTensors
from shared.engine.progress import Progress
from shared.engine.torch_backend import Kernels, TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kvcache.pools import TokenToKVPool
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.dummy_weights import DummyWeights
from shared.protocol.sampling_params import SamplingParams

META = torch.device("meta")
NUM_ROWS = 6
"""Rows, and pages of 16 tokens."""


class MetaRig:
    """A runner over a model that has no memory."""

    def __init__(
        self,
        model: ModelConfig,
        make_kernels: Callable[[TokenToKVPool], Kernels] = lambda pool: torch_kernels(pool.device),
        context_length: int = 64,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        shape = EngineShape(
            name="meta",
            model=model,
            dtype=torch.bfloat16,
            device=META,
            cache=CacheOptions(page_size=16),
            schedule=ScheduleOptions(max_running_requests=NUM_ROWS),
            context_length=context_length,
            decodes=True,
        )
        pool = TokenToKVPool(
            num_pages=10,
            page_size=shape.cache.page_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=kv_dtype,
            device=META,
        )
        weights = Decoder.load(DummyWeights(0, META), model, dtype=shape.dtype, device=META)
        backend = TorchBackend(make_kernels(pool), weights, pool, Progress(), shape.forward_limits)
        self.runner = ModelRunner(backend, NUM_ROWS, META)
        self.batches = StartBatches(shape)

    def run(
        self,
        extends: list[Extend],
        decodes: list[tuple[int, int]],
        params: SamplingParams,
        *,
        with_grammars: bool = False,
    ) -> SampledTensors:
        batch = self.batches.forward(extends, decodes, params)
        writes = tuple((row, 40) for row, _ in decodes[:1])
        batch = replace(batch, future_writes=writes, window_table_BP=batch.page_table_BP)
        mask = self.batches.mask_of(batch) if with_grammars else None
        return self.runner.sample(self.runner.forward(batch), mask)
