"""Two engines over pools of their own, one with the CUDA graphs of `tests.fake_graphs`: are they equal to the bit?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shared.engine.cuda.cuda_graphs import Graphs
from shared.engine.future_map import FutureMap
from shared.engine.input_block import BlockShape
from shared.engine.model_runner import Forwarded
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.progress import Progress
from shared.engine.torch_backend import Kernels, TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kvcache.pools import TokenToKVPool
from shared.model.checkpoint import Checkpoint
from shared.model.config import ModelConfig, load_model_config
from shared.model.decoder import Decoder
from tests.backend_rig import CPU, LIMITS, NUM_ROWS, PAGE_SIZE, PAGES_A_ROW, kv_pool
from tests.fake_graphs import BlockAttention, Copied, FakeGraphPool, RowwiseOps, copy_to_spoiled_block, spoil

SHAPES = tuple(BlockShape(*shape) for shape in [(1, 1), (2, 2), (4, 4), (8, 8), (16, 4), (32, 8)])
MakeKernels = Callable[[ModelConfig, TokenToKVPool], Kernels]


def rowwise_kernels(config: ModelConfig, pool: TokenToKVPool) -> Kernels:
    """torch's operations, with bits that do not depend on padding, and attention that can be captured."""
    return replace(torch_kernels(CPU), attention=BlockAttention(), make_ops=RowwiseOps.make)


class Engine:
    """A backend over a pool of its own, with graphs of `shapes` or without."""

    def __init__(
        self,
        folder: Path,
        shapes: Sequence[BlockShape] = (),
        make_kernels: MakeKernels = rowwise_kernels,
    ) -> None:
        config = load_model_config(folder)
        self.decoder = Decoder.load(Checkpoint(folder), config, dtype=torch.float32, device=CPU)
        self.pool = kv_pool(config, 1 + NUM_ROWS * PAGES_A_ROW, PAGE_SIZE, torch.float32)
        self.graph_pool, self.progress = FakeGraphPool(), Progress()
        self.future_map = FutureMap(NUM_ROWS, CPU)
        self.num_copies = 0
        """To the device."""
        self.backend = TorchBackend(
            make_kernels(config, self.pool),
            self.decoder,
            self.pool,
            self.progress,
            LIMITS,
            graphs=Graphs(self.graph_pool, shapes) if shapes else None,
            start_copy=self._start_copy,
        )

    @property
    def num_replays(self) -> int:
        """Of all graphs."""
        return sum(graph.num_replays for graph in self.graph_pool.graphs)

    @classmethod
    def captured(
        cls,
        folder: Path,
        shapes: Sequence[BlockShape] = SHAPES,
        make_kernels: MakeKernels = rowwise_kernels,
    ) -> Engine:
        """With its graphs."""
        engine = cls(folder, shapes, make_kernels)
        with torch.inference_mode():
            engine.backend.capture_graphs(engine.future_map)
        return engine

    def forward(self, batch: ModelWorkerBatch) -> Forwarded:
        """A forward whose sequences take the likeliest token. The results of the one before are spoiled."""
        with torch.inference_mode():
            if self.backend._results is not None:
                spoil(self.backend._results.logits_SV)
                spoil(self.backend._results.hidden_TD)
            forwarded = self.backend.forward(batch, self.future_map)
            if forwarded.logits_SV is not None:
                self.future_map.store(forwarded.rows_S, forwarded.logits_SV.argmax(dim=1))
        return forwarded

    def _start_copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        self.num_copies += 1
        return copy_to_spoiled_block(to, source)


def check_same(eager: Engine, graphed: Engine, batch: ModelWorkerBatch) -> None:
    """Logits, KV and FutureMap, but for the padding row and the scratch page."""
    expected, found = eager.forward(batch), graphed.forward(batch)
    if expected.logits_SV is None or found.logits_SV is None:
        assert expected.logits_SV is found.logits_SV
    else:
        assert torch.equal(found.logits_SV, expected.logits_SV)
    assert torch.equal(found.rows_S, expected.rows_S)
    if expected.hidden_ND is not None:
        assert found.hidden_ND is not None
        assert torch.equal(found.hidden_ND, expected.hidden_ND)
    assert torch.equal(graphed.pool.buffer_LSNHPD[:, :, 1:], eager.pool.buffer_LSNHPD[:, :, 1:])
    tokens = [engine.future_map.last_token_R[:NUM_ROWS] for engine in (eager, graphed)]
    assert torch.equal(*tokens)
