"""In bf16 with --exact, the KV and logits of a token have the same bits on a GPU however they are computed.

That is, in any batch, cut into extends and decode steps anywhere, launched kernel by kernel or replayed from graphs.

The property is that of tests/prop/test_exact_continuation.py, which is about the native kernels of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from shared.engine.backends import load_model
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from tests.device import device
from tests.modelzoo import make_model
from tests.prop.test_exact_continuation import Engine, Expected, Piece, assert_same_bits, cuts

ON_A_GPU = device().type == "cuda"
MODELS = {
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 512},
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 512},
}
if not ON_A_GPU:
    MODELS = {"qwen3": {"num_hidden_layers": 2}}
NUM_CUTS = 40 if ON_A_GPU else 3


def new_engine(folder: Path, cuda_graph_max_bs: int | None = None) -> Engine:
    config = load_model_config(folder)
    model = load_model(
        "triton" if ON_A_GPU else "native",
        Checkpoint(folder),
        config,
        dtype=torch.bfloat16,
        device=device(),
        cores=(-1,),
        on_progress=lambda what, fraction: None,
        exact=ON_A_GPU,
        cuda_graph_max_bs=cuda_graph_max_bs,
    )
    return Engine(config, model, 16, device())


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exact") / request.param
    return make_model(made, request.param, dtype="bfloat16", **MODELS[request.param])


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Expected]:
    with closing(new_engine(folder)) as engine:
        assert engine.backend.is_exact, "the self test of a node that starts holds it to that"
        yield Expected(engine)


@given(cut=cuts)
@settings(max_examples=NUM_CUTS)
def test_every_cut_gives_the_same_bits(folder: Path, expected: Expected, cut: list[Piece]) -> None:
    with closing(new_engine(folder)) as engine:
        assert_same_bits(engine, expected, cut)


@pytest.fixture(scope="module")
def replaying(folder: Path) -> Iterator[Engine]:
    with closing(new_engine(folder, cuda_graph_max_bs=8)) as engine:
        with torch.inference_mode():
            engine.backend.capture_graphs(engine.future_map)
        yield engine


@given(cut=cuts)
@settings(max_examples=max(NUM_CUTS // 4, 1))
def test_replayed_forwards_give_the_same_bits(
    replaying: Engine, expected: Expected, cut: list[Piece]
) -> None:
    replaying.pool.buffer_LSNHPD.zero_()
    assert_same_bits(replaying, expected, cut)
