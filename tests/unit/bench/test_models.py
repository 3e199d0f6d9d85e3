"""The random models of the benches load, and the sizes that limits are computed from are theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from tests.bench.models import SHAPES, VOCAB_SIZE, Shape, write_random_model


@pytest.mark.parametrize("name", SHAPES)
def test_a_random_model_loads_and_has_the_sizes_of_its_shape(name: str, tmp_path: Path) -> None:
    shape = replace(SHAPES[name], hidden_size=32, intermediate_size=48, num_layers=2, head_dim=16)
    write_random_model(tmp_path, shape)
    decoder = Decoder.load(
        Checkpoint(tmp_path), load_model_config(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    read = [decoder.weights.lm_head_VD]
    for layer in decoder.weights.layers:
        read += [layer.qkv_proj_QD, layer.o_proj_DA, layer.gate_up_proj_GD, layer.down_proj_DF]
    assert sum(weight.nbytes for weight in read) == shape.weight_nbytes
    assert [tuple(weight.shape) for weight in read[1:5]] == shape.linears
    assert shape.lm_head_flops == 2 * VOCAB_SIZE * 32


def test_flops_and_bytes_of_a_forward() -> None:
    shape = Shape(
        architecture="",
        model_type="",
        hidden_size=4,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=5,
        tie_word_embeddings=True,
    )
    assert shape.linears == [(8, 4), (4, 4), (10, 4), (4, 5)]
    assert shape.linear_flops == 3 * 2 * (32 + 16 + 40 + 20)
    assert shape.kv_nbytes == 3 * 2 * 2 * 2
    assert shape.attention_flops(0, 2) == 3 * (2 * 2 * 2 * 2) * 3
    assert shape.attention_flops(10, 1) == 3 * (2 * 2 * 2 * 2) * 11
