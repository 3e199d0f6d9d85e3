"""A node's own engine, fed with forwards made by hand: what a step costs without a scheduler.

The KV pool is full of random values, and a sequence's pages lie anywhere in it, as they do after a while of serving.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import build_engine
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import SamplingInputs
from shared.kernels.row_codes import split_codes
from shared.kvcache.pools import TokenToKVPool
from shared.kvcache.windowed_pool import WindowedKVPool
from tests.bench.models import SHAPES, Shape, random_model, write_configs

PAGE_SIZE = 16


class Forwards:
    """Runs forwards of a model on the forward stream of a node's engine, one at a time."""

    def __init__(self, config: NodeConfig, shape: Shape) -> None:
        self.shape = shape
        self.engine = build_engine(config, lambda what, fraction: None)
        self.kernels = self.engine.attention_backend
        """What computes the model, such as `native` or `torch`."""
        pool, self._num_window_pages = self.engine.pool, 0
        if isinstance(pool, WindowedKVPool):
            fill_pool(pool.window)
            self._num_window_pages, pool = pool.window.num_pages - 1, pool.full
        fill_pool(pool)
        self._pages = np.random.default_rng(0).permutation(pool.num_pages - 1).astype(np.int32) + 1

    @classmethod
    def on_cores(
        cls,
        model: str | Shape,
        cores: Sequence[int],
        *,
        num_tokens: int,
        max_batch: int,
        quantization: str | None = None,
        weight_only: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> Forwards:
        """A random model on cores of this machine. One of which the shape is given is made while it is loaded."""
        options = ModelOptions(
            cpu_cores=CpuCores(len(cores), tuple(cores)),
            quantization=quantization,
            weight_only_quantization=weight_only,
        )
        config = NodeConfig(
            model=options,
            cache=CacheOptions(
                max_total_tokens=num_tokens, page_size=PAGE_SIZE, kv_cache_dtype=kv_cache_dtype
            ),
            schedule=ScheduleOptions(max_running_requests=max_batch),
        )
        if isinstance(model, str):
            options = replace(options, model=str(random_model(model)))
            return cls(replace(config, model=options), SHAPES[model])
        with tempfile.TemporaryDirectory() as folder:
            write_configs(Path(folder), model)
            return cls(replace(config, model=replace(options, model=folder, load_format="dummy")), model)

    def decode(self, batch: int, context: int) -> ModelWorkerBatch:
        """A decode step of `batch` sequences that have `context` tokens each with the new one."""
        return self._batch(
            np.empty(0, dtype=np.int64),
            starts=np.full(batch, context - 1, dtype=np.int64),
            lengths=np.ones(batch, dtype=np.int64),
        )

    def extend(self, start: int, length: int) -> ModelWorkerBatch:
        """A prompt of which `start` tokens are cached and `length` are computed; one token is sampled."""
        ids = np.random.default_rng(start + length).integers(256, self.shape.vocab_size, length)
        return self._batch(ids, starts=np.array([start]), lengths=np.array([length]))

    def seconds(self, batch: ModelWorkerBatch) -> float:
        """From its launch until its tokens are on the host."""
        begun = time.perf_counter()
        stream = self.engine.stream
        stream.sample(stream.submit(batch)).wait()
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the forward stream."""
        self.engine.stream.close()

    def _batch(self, input_ids: np.ndarray, *, starts: np.ndarray, lengths: np.ndarray) -> ModelWorkerBatch:
        num, num_pages = len(starts), -(-int((starts + lengths).max()) // PAGE_SIZE)
        table_BP = self._pages[: num * num_pages].reshape(num, num_pages).copy()
        return ModelWorkerBatch(
            num_decodes=num if len(input_ids) == 0 else 0,
            input_ids=input_ids,
            rows_B=np.arange(num, dtype=np.int64),
            starts_B=starts,
            lengths_B=lengths,
            page_table_BP=table_BP,
            sampled_B=np.arange(num, dtype=np.int64),
            sampling=SamplingInputs(),
            future_writes=(),
            window_table_BP=table_BP % self._num_window_pages + 1 if self._num_window_pages else None,
        )


def fill_pool(pool: TokenToKVPool) -> None:
    """Random values, or codes with one scale."""
    if pool.dtype == torch.int8:
        codes, scales = split_codes(pool.buffer_LSNHPD)
        codes.copy_(torch.randint(-127, 128, codes.shape[2:], dtype=torch.int8))
        scales.fill_(1 / 127)
    elif pool.num_layers:
        fill_randomly(pool.buffer_LSNHPD)


def fill_randomly(buffer: torch.Tensor) -> None:
    """A block of normal values, over and over: drawing gigabytes would take longer than the bench."""
    flat = buffer.view(-1)
    block = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(buffer)
    for first in range(0, flat.numel(), block.numel()):
        part = flat[first : first + block.numel()]
        part.copy_(block[: part.numel()])
