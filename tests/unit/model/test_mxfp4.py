"""MXFP4 experts against transformers' reading of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shared.errors import ModelError
from shared.model.checkpoint import Checkpoint
from shared.model.config import ModelConfig, load_model_config
from shared.model.decoder import Decoder
from shared.model.dummy_weights import DummyWeights
from shared.model.formats.common import LinearSpec
from shared.model.formats.mxfp4 import MXFP4
from shared.model.linear import DenseLinear, QuantizedLinear
from shared.model.quantization import Layout, Scheme, of_dummy_weights
from shared.model.weights import ExpertsWeights, load_weights
from tests.modelzoo import make_model, random_prompt, reference_logits
from tests.quantized_models import mxfp4, quantize_folder
from tests.unit.model.test_decoder import CPU, logits_in_chunks

SCHEME = Scheme(layout=Layout.MXFP4, bits=4, group_size=32, is_symmetric=True)


class Tensors:
    """A TensorReader of tensors that are there."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        return self._tensors[name][part]

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.read(name)


@given(st.integers(0, 1 << 32), st.integers(1, 9), st.integers(1, 3), st.sampled_from([0, 100, 220]))
def test_a_weight_is_what_transformers_makes_of_it(seed: int, n: int, groups: int, least: int) -> None:
    """To the bit, but for weights of about 2^-126, which scales 0 and 1 make 0 here."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (n, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(least, least + 33, (n, groups), generator=generator, dtype=torch.uint8)
    layer = LinearSpec("w", n, 32 * groups, SCHEME)
    read = MXFP4.read(Tensors(w_blocks=blocks, w_scales=scales), layer, torch.bfloat16)
    assert isinstance(read, QuantizedLinear)
    expected_KN = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0]
    torch.testing.assert_close(read.dequantized(), expected_KN.T, rtol=0, atol=2.0**-123)


def test_the_least_scales_count_as_0() -> None:
    blocks, scales = torch.full((1, 3, 16), 0x77, dtype=torch.uint8), torch.arange(3, dtype=torch.uint8)
    layer = LinearSpec("w", 1, 96, SCHEME)
    read = MXFP4.read(Tensors(w_blocks=blocks, w_scales=scales[None]), layer, torch.bfloat16)
    assert isinstance(read, QuantizedLinear)
    assert read.dequantized()[0, ::32].tolist() == [0.0, 0.0, 6 * 2.0**-125]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mxfp4")
    return quantize_folder(make_model(root / "dense", "gptoss"), root / "mxfp4", mxfp4())


def weight_only(config: ModelConfig) -> ModelConfig:
    assert config.quantization is not None
    return replace(config, quantization=config.quantization.weight_only())


def test_logits_are_those_of_transformers(folder: Path) -> None:
    """To float32's sums where activations stay what they are. Codes of 8 bits move them a little."""
    config, ids = load_model_config(folder), random_prompt(60, seed=1)
    expected = reference_logits(folder / "dense", ids)
    for model, bound in ((weight_only(config), 3e-4), (config, 1.0)):
        decoder = Decoder.load(Checkpoint(folder), model, dtype=torch.float32, device=CPU)
        logits = logits_in_chunks(decoder, ids, [7, 16, 1, 1, 35])
        assert (logits - expected).abs().mean() < bound / 10 and (logits - expected).abs().max() < 4 * bound
    assert config.quantization is not None and config.quantization.name == "W4A8 mxfp4"
    assert weight_only(config).quantization.name == "W4A16 mxfp4"  # type: ignore[union-attr]


def test_experts_that_are_left_out_stay_dense(folder: Path, tmp_path: Path) -> None:
    """By the beginning of a name with wildcards, or by its end."""
    config = json.loads((folder / "config.json").read_text())
    for pattern in ("model.layers.1", "model.*.1.mlp", "1.mlp.experts"):
        config["quantization_config"]["modules_to_not_convert"] = [pattern]
        (tmp_path / "config.json").write_text(json.dumps(config))
        quantization = load_model_config(tmp_path).quantization
        assert quantization is not None
        for i, scheme in enumerate((SCHEME, None, SCHEME)):
            assert quantization.scheme_of(f"model.layers.{i}.mlp.experts.down_proj") == scheme
        assert quantization.scheme_of("model.layers.0.mlp.router") is None
        assert quantization.scheme_of("model.layers.0.self_attn.q_proj") is None


def test_what_is_wrong_in_a_file_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"][3, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}: a scale"):
        load_weights(Checkpoint(tmp_path), load_model_config(tmp_path), dtype=torch.bfloat16, device=CPU)
    del tensors[f"{name}_blocks"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}_blocks"):
        load_weights(Checkpoint(tmp_path), load_model_config(tmp_path), dtype=torch.bfloat16, device=CPU)


def test_widths_that_are_no_multiple_of_32_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "gptoss", intermediate_size=40) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": mxfp4()[0]}))
    with pytest.raises(ModelError, match=r"40 .*group_size 32"):
        load_weights(DummyWeights(0, CPU), load_model_config(tmp_path), dtype=torch.bfloat16, device=CPU)


def test_dummy_weights_are_mxfp4_of_the_right_size(folder: Path) -> None:
    config = load_model_config(folder)
    assert config.quantization is not None
    config = replace(config, quantization=of_dummy_weights(config.quantization, is_tied=False))
    mlp = load_weights(DummyWeights(0, CPU), config, dtype=torch.bfloat16, device=CPU).layers[0].mlp
    assert isinstance(mlp, ExpertsWeights) and isinstance(mlp.router, DenseLinear)
    weights = [each.gate_up_proj for each in mlp.experts]
    assert all(isinstance(each, QuantizedLinear) and each.is_float for each in weights)
    first, second = (each.dequantized() for each in weights[:2] if isinstance(each, QuantizedLinear))
    assert not torch.equal(first, second) and 0.7 < first.std() * 64**0.5 < 1.5
