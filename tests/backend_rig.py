"""A model backend alone, over a small pool, fed with batches made by hand: for tests and benches of the forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shared.engine.backends import LoadedModel, NativeModel, load_model
from shared.engine.future_map import FutureMap
from shared.engine.input_block import BlockShape, ForwardLimits, InputBlock
from shared.engine.model_runner import ModelBackend
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.progress import Progress
from shared.engine.sampling_inputs import SamplingInputs
from shared.kernels.cpu.library import Team, load_library
from shared.kvcache.pools import TokenToKVPool
from shared.model.checkpoint import Checkpoint
from shared.model.config import ModelConfig, load_model_config
from shared.model.packed_weights import load_packed_weights

CPU = torch.device("cpu")
PAGE_SIZE, PAGES_A_ROW, NUM_ROWS = 4, 20, 8
LIMITS = ForwardLimits(num_rows=NUM_ROWS, context_length=PAGE_SIZE * PAGES_A_ROW, max_tokens=512)


class Rig:
    """A backend over a small pool, with one row of pages for each sequence."""

    def __init__(self, backend: ModelBackend, progress: Progress) -> None:
        self.backend, self.progress = backend, progress
        self.future_map = FutureMap(NUM_ROWS, CPU)

    def extend(self, chunks: dict[int, tuple[int, Sequence[int]]], **changes: object) -> torch.Tensor:
        """Rows with (start, ids); the logits of each."""
        return self.forward(chunks, {}, **changes)

    def forward(
        self,
        extends: dict[int, tuple[int, Sequence[int]]],
        decodes: dict[int, int],
        **changes: object,
    ) -> torch.Tensor:
        """Extends, and rows with the start of their one token; the logits of each."""
        self.run(extends, decodes, **changes)
        assert self.logits is not None
        return self.logits.clone()

    def run(
        self,
        extends: dict[int, tuple[int, Sequence[int]]],
        decodes: dict[int, int],
        **changes: object,
    ) -> torch.Tensor | None:
        """The hidden states that were asked for; the logits are in `logits`."""
        batch = replace(batch_of(extends, decodes), **changes)  # type: ignore[arg-type]
        with torch.inference_mode():
            forwarded = self.backend.forward(batch, self.future_map)
        self.logits = forwarded.logits_SV
        return forwarded.hidden_ND


@contextmanager
def rig(folder: Path, kernels: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[Rig]:
    config = load_model_config(folder)
    model = load_model(
        kernels,
        Checkpoint(folder),
        config,
        dtype=dtype,
        device=CPU,
        cores=(-1, -1),
        on_progress=lambda what, fraction: None,
    )
    path = _bound(model, kv_pool(config, 1 + NUM_ROWS * PAGES_A_ROW, PAGE_SIZE, dtype))
    try:
        yield path
    finally:
        path.backend.close()


def native_model(folder: Path, config: ModelConfig, num_threads: int, flags: Sequence[str]) -> NativeModel:
    """A model for the native kernels built with more compiler `flags`."""
    team = Team(load_library(*flags), [-1] * num_threads)
    return NativeModel(
        config, load_packed_weights(Checkpoint(folder), config, team, on_progress=lambda fraction: None), team
    )


def kv_pool(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    num_layers: int | None = None,
) -> TokenToKVPool:
    """A pool of KV pages for a model, or for `num_layers` of its layers."""
    return TokenToKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=config.num_layers if num_layers is None else num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )


def _bound(model: LoadedModel, pool: TokenToKVPool) -> Rig:
    progress = Progress()
    return Rig(model.bind(pool, progress, LIMITS), progress)


def batch_of(extends: dict[int, tuple[int, Sequence[int]]], decodes: dict[int, int]) -> ModelWorkerBatch:
    # A row's pages lie backwards, so that none follows the one before.
    tables = 1 + np.arange(NUM_ROWS * PAGES_A_ROW, dtype=np.int32).reshape(NUM_ROWS, -1)[:, ::-1]
    return batch_over(tables, PAGE_SIZE, extends, decodes)


def block_words(batch: ModelWorkerBatch, page_size: int, work: np.ndarray) -> torch.Tensor:
    """The input block of a batch on the host, int32."""
    return InputBlock(0, NUM_ROWS, page_size, CPU, None).fill(batch, BlockShape.of(batch), work).words


def batch_over(
    tables: np.ndarray,
    page_size: int,
    extends: dict[int, tuple[int, Sequence[int]]],
    decodes: dict[int, int],
) -> ModelWorkerBatch:
    """A batch whose rows have the pages of `tables` [row, page]."""
    rows = np.array([*extends, *decodes], dtype=np.int64)
    starts = np.array([start for start, _ in extends.values()] + [*decodes.values()], dtype=np.int64)
    lengths = np.array([len(ids) for _, ids in extends.values()] + [1] * len(decodes), dtype=np.int64)
    num_pages = -(-int((starts + lengths).max()) // page_size)
    return ModelWorkerBatch(
        num_decodes=len(decodes),
        input_ids=np.array([token for _, ids in extends.values() for token in ids], dtype=np.int64),
        rows_B=rows,
        starts_B=starts,
        lengths_B=lengths,
        page_table_BP=tables[rows, :num_pages],
        sampled_B=np.arange(len(rows)),
        sampling=SamplingInputs(),
        future_writes=(),
    )
