"""Random weights from a config.json alone: the same on every node and device, and sane."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.model.config import ModelConfig, load_model_config
from shared.model.dummy_weights import TABLE_LENGTH, DummyWeights
from shared.model.weights import DecoderWeights, WeightReader, load_weights
from tests.unit.model.conftest import ModelFolder
from tests.weight_tensors import tensors_of

CPU = torch.device("cpu")


def load(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(DummyWeights(seed, CPU), config, dtype=dtype, device=CPU)


@pytest.fixture
def config(model_folder: ModelFolder) -> ModelConfig:
    return load_model_config(model_folder("qwen2"))


def test_the_same_seed_gives_the_same_bits(config: ModelConfig) -> None:
    for one, other in zip(tensors_of(load(config)), tensors_of(load(config)), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(load(config).embed_VD, load(config, seed=1).embed_VD)


def test_tensors_and_layers_differ(config: ModelConfig) -> None:
    first, second = load(config).layers[:2]
    assert not torch.equal(first.attention.qkv_proj.weight_NK, second.attention.qkv_proj.weight_NK)
    q, k = first.attention.qkv_proj.weight_NK[:8], first.attention.qkv_proj.weight_NK[64:72]
    assert not torch.equal(q, k)
    assert len(first.attention.o_proj.weight_NK.unique(dim=0)) == len(first.attention.o_proj.weight_NK)


def test_products_keep_the_scale_of_their_input(model_folder: ModelFolder) -> None:
    weights = load(load_model_config(model_folder("qwen2", hidden_size=512, vocab_size=4000)))
    for matrix in (weights.lm_head.weight_NK, weights.layers[0].mlp.gate_up_proj.weight_NK):
        out = torch.randn(64, matrix.shape[1]) @ matrix.T
        assert out.std().item() == pytest.approx(1.0, abs=0.1)
    assert (weights.norm_D == 1).all() and (weights.layers[0].attention_norm_D == 1).all()


def test_pieces_are_the_tensor(config: ModelConfig) -> None:
    """Also where the table begins anew: the embedding is longer than the table."""
    config = replace(config, vocab_size=2 * TABLE_LENGTH // 64, tie_word_embeddings=True)
    source = DummyWeights(5, CPU, piece_elements=700 * 64)
    with WeightReader(source, config, dtype=torch.bfloat16, device=CPU) as reader:
        pieces = list(reader.lm_head_pieces())
    whole = load(config, seed=5, dtype=torch.bfloat16).embed_VD
    assert len(pieces) > 10
    assert torch.equal(torch.cat([rows.weight_NK for _, rows in pieces]), whole)
    assert [first for first, _ in pieces[:3]] == [0, 700, 1400]


def test_any_device_will_do(config: ModelConfig) -> None:
    meta = torch.device("meta")
    weights = load_weights(DummyWeights(0, meta), config, dtype=torch.bfloat16, device=meta)
    assert {tensor.device for tensor in tensors_of(weights)} == {meta}


def test_progress_rises_to_one(config: ModelConfig) -> None:
    seen: list[float] = []
    load_weights(DummyWeights(0, CPU), config, dtype=torch.float32, device=CPU, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
