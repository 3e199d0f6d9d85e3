"""TritonAttention within a forward: right beside torch's attention, exact however a sequence is cut, and captured.

Products are those of RowwiseOps, whose bits do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.engine.attention import AttentionBackend, TorchAttention
from shared.engine.cuda.cuda_graphs import Graphs
from shared.engine.cuda.triton_attention import TritonAttention
from shared.engine.cuda.triton_kernels import triton_kernels
from shared.engine.future_map import FutureMap
from shared.engine.input_block import BlockShape, ForwardLimits
from shared.engine.progress import Progress
from shared.engine.torch_backend import TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kernels.triton import attention_work
from shared.kernels.triton.attention import PagedAttention
from shared.kernels.triton.linear import FLOAT32, ExactLinear
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from tests.backend_rig import CPU, batch_over, kv_pool
from tests.device import device
from tests.fake_graphs import FakeGraphPool, RowwiseOps, copy_to_spoiled_block
from tests.modelzoo import make_model, random_prompt

pytestmark = pytest.mark.skipif(device().type != "cpu", reason="fake graphs are on a CPU")

LENGTH, NUM_ROWS, PAGE_SIZE = attention_work.SPLIT + 48, 4, 16
IDS = random_prompt(LENGTH, seed=1)
LIMITS = ForwardLimits(num_rows=NUM_ROWS, context_length=LENGTH, max_tokens=LENGTH)
TABLES = 1 + np.random.default_rng(0).permutation(NUM_ROWS * LENGTH // PAGE_SIZE).astype(np.int32)
TABLES = TABLES.reshape(NUM_ROWS, -1)
SHAPES = BlockShape(4, 4), BlockShape(48, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    return make_model(
        folder,
        "qwen3",
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )


class Engine:
    """A backend over a pool of its own, with graphs of `shapes` or without."""

    def __init__(self, folder: Path, *, triton: bool = True, shapes: Sequence[BlockShape] = ()) -> None:
        config = load_model_config(folder)
        self.pool = kv_pool(config, 1 + TABLES.size, PAGE_SIZE, torch.float32)
        self.pool.buffer_LSNHPD[:, :, 1:] = torch.nan
        self.future_map = FutureMap(NUM_ROWS, CPU)
        attention: AttentionBackend = TorchAttention()
        if triton:
            kernels = PagedAttention(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                page_size=PAGE_SIZE,
                dtype=torch.float32,
                device=CPU,
                exact=True,
                workspace_nbytes=1 << 20,
            )
            attention = TritonAttention(kernels)
        self.graph_pool = FakeGraphPool()
        self.backend = TorchBackend(
            replace(torch_kernels(CPU), attention=attention, make_ops=RowwiseOps.make),
            Decoder.load(Checkpoint(folder), config, dtype=torch.float32, device=CPU),
            self.pool,
            Progress(),
            LIMITS,
            graphs=Graphs(self.graph_pool, shapes) if shapes else None,
            start_copy=copy_to_spoiled_block,
        )
        with torch.inference_mode():
            if shapes:
                self.backend.capture_graphs(self.future_map)

    def forward(self, extends: dict[int, tuple[int, Sequence[int]]], decodes: dict[int, int]) -> torch.Tensor:
        for row, start in decodes.items():
            self.future_map.last_token_R[row] = IDS[start]
        with torch.inference_mode():
            forwarded = self.backend.forward(batch_over(TABLES, PAGE_SIZE, extends, decodes), self.future_map)
        assert forwarded.logits_SV is not None
        return forwarded.logits_SV.clone()

    def kv(self, row: int, length: int) -> torch.Tensor:
        """K and V of a row, [layer, K or V, token, head, dim]."""
        pages = self.pool.buffer_LSNHPD[:, :, torch.from_numpy(TABLES[row].astype(np.int64))]
        return pages.transpose(3, 4).flatten(2, 3)[:, :, :length]


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and KV of one extend."""
    engine = Engine(folder)
    return engine.forward({0: (0, IDS)}, {}), engine.kv(0, LENGTH)


def test_numerics_say_that_streams_continue_inexactly_but_with_exact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(folder)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(ExactLinear, "of", lambda device, dtype: ExactLinear(4, (FLOAT32,)))
    pool = kv_pool(config, 2, PAGE_SIZE, torch.float32)
    kernels = [triton_kernels(config, torch.float32, CPU, exact=exact)(pool) for exact in (False, True)]
    assert [made.is_exact for made in kernels] == [False, True]
    inexact, exact = (made.numerics for made in kernels)
    assert exact.endswith("/a GPU/exact")
    assert inexact == f"{exact.removesuffix('/exact')}/inexact/cublas-{torch.__version__}"


def test_beside_torchs_attention(folder: Path, whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    engine = Engine(folder, triton=False)
    torch.testing.assert_close(engine.forward({0: (0, IDS)}, {}), whole[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(engine.kv(0, LENGTH), whole[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("first", "shapes"), [(LENGTH - 60, ()), (attention_work.SPLIT, SHAPES)], ids=["eager", "graphs"]
)
def test_decode_steps_and_chunks_leave_the_bits_of_one_extend(
    folder: Path, whole: tuple[torch.Tensor, torch.Tensor], first: int, shapes: Sequence[BlockShape]
) -> None:
    """Other rows decode or extend beside it."""
    engine = Engine(folder, shapes=shapes)
    engine.forward({0: (0, IDS[:first]), 1: (0, IDS[:70])}, {})
    for step in range(8):
        engine.forward(
            {2: (9 * step, IDS[9 * step : 9 * step + 9])} if step % 2 == 0 else {},
            {1: 70 + step, 0: first + step},
        )
    at = first + 8
    engine.forward({0: (at, IDS[at : at + 17])}, {1: 78})
    logits = engine.forward({0: (at + 17, IDS[at + 17 :])}, {})
    assert torch.equal(logits, whole[0])
    assert torch.equal(engine.kv(0, LENGTH), whole[1])
    assert torch.equal(engine.kv(1, 79), whole[1][:, :, :79])
    assert sum(graph.num_replays for graph in engine.graph_pool.graphs) == (10 if shapes else 0)
