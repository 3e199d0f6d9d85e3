"""Triton's kernels in CUDA graphs: replayed forwards against eager ones, to the bit, with products that are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shared.engine.cuda.triton_kernels import make_triton_kernels
from shared.engine.input_block import BlockShape
from shared.engine.torch_backend import Kernels
from shared.kernels.triton.linear import ExactLinear
from shared.kvcache.pools import TokenToKVPool
from shared.model.config import ModelConfig
from tests.backend_rig import NUM_ROWS, PAGES_A_ROW, batch_of
from tests.device import device
from tests.graph_rig import Engine, check_same
from tests.modelzoo import make_model, random_prompt

pytestmark = [
    pytest.mark.skipif(device().type != "cpu", reason="graphs are faked on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # padding is computed on whatever is in memory
]
SHAPES = [BlockShape(4, 4), BlockShape(12, 4)]


def exact_kernels(config: ModelConfig, pool: TokenToKVPool) -> Kernels:
    """Interpreted."""
    return make_triton_kernels(config, pool.dtype, pool, ExactLinear(num_processors=3), "interpreted")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen3"
    return make_model(path, "qwen3", num_hidden_layers=1, vocab_size=300)


def test_a_replay_finds_its_work_in_the_block(folder: Path) -> None:
    """Extends, mixed batches and decode steps, at a bucket's edge and padded, over pages that lie backwards."""
    eager = Engine(folder, make_kernels=exact_kernels)
    graphed = Engine.captured(folder, SHAPES, exact_kernels)
    ids = [random_prompt(30, seed=row, vocab_size=300) for row in range(NUM_ROWS)]
    check_same(eager, graphed, batch_of({0: (0, ids[0][:12])}, {}))
    check_same(eager, graphed, batch_of({1: (0, ids[1][:7]), 2: (0, ids[2][:2])}, {0: 12}))
    check_same(eager, graphed, batch_of({}, {0: 13, 1: 7, 2: 2}))
    check_same(eager, graphed, batch_of({1: (8, ids[1][8:11])}, {2: 3}))
    assert graphed.num_replays == 4


def test_layers_with_windows_find_their_own_page_table(tmp_path: Path) -> None:
    """It lies behind the other one, at a place that the header tells."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 300, "sliding_window": 9}  # the second has no window
    folder = make_model(tmp_path / "gemma3", "gemma3", **sizes)
    eager = Engine(folder, make_kernels=exact_kernels)
    graphed = Engine.captured(folder, SHAPES, exact_kernels)
    ids = random_prompt(30, seed=1, vocab_size=300)
    batches = (
        batch_of({0: (0, ids[:12])}, {}),
        batch_of({1: (0, ids[:7])}, {0: 12}),
        batch_of({}, {0: 13, 1: 7}),
    )
    for batch in batches:
        windows_BP = 1 + NUM_ROWS * PAGES_A_ROW - batch.page_table_BP
        check_same(eager, graphed, replace(batch, window_table_BP=windows_BP))
    assert graphed.num_replays == 3
    first, last = (
        eager.pool.layer_kv(layer)[0].flatten(1).any(1).nonzero()[:, 0].tolist() for layer in (0, 1)
    )
    assert [1 + NUM_ROWS * PAGES_A_ROW - page for page in reversed(first)] == last
