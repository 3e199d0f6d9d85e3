"""Configs as they are published: what is read of them, and a forward at their widths and one layer.

Weights and activations are on torch's meta device, which has shapes alone. The numbers of parameters are those of the
models' cards.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.backends import NativeModel
from shared.engine.cuda.batches import GREEDY, Extend
from shared.errors import ModelError
from shared.kernels.cpu.library import Team, load_library
from shared.model.config import ModelConfig, load_model_config
from shared.model.dummy_weights import DummyWeights
from shared.model.packed_weights import load_packed_weights, native_obstacle
from shared.model.quantization import quantize_on_load
from shared.model.rope import LinearScaling, LongScaling, YarnScaling
from shared.model.weights import weights_nbytes
from tests.backend_rig import CPU
from tests.meta_rig import MetaRig
from tests.prop.test_exact_continuation import IDS, Engine


@dataclass(frozen=True)
class Published:
    """A model of published.json; `num_parameters` are those of its text part, as its card has them."""

    source: str
    num_parameters: float
    context_length: int
    config: dict[str, Any]


MODELS = {
    name: Published(**fields)
    for name, fields in json.loads(Path(__file__).with_name("published.json").read_text()).items()
}
MIXTURES = ("gpt-oss-20b", "Qwen3-30B-A3B")


def load(folder: Path, name: str, **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(MODELS[name].config | changes))
    return load_model_config(folder)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config(tmp_path: Path, name: str) -> None:
    config, published = load(tmp_path, name), MODELS[name]
    assert config.max_position_embeddings == published.context_length
    assert native_obstacle(config) is None
    in_16_bits = replace(config, quantization=None)
    assert weights_nbytes(in_16_bits, torch.bfloat16) / 2 == pytest.approx(published.num_parameters, rel=3e-3)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in MIXTURES])
def test_a_forward_of_random_weights_at_full_width(tmp_path: Path, name: str) -> None:
    fields = MODELS[name].config
    part = fields.get("text_config", {}) | {"num_hidden_layers": 1}
    rig = MetaRig(load(tmp_path, name, **({"text_config": part} if "text_config" in fields else part)))
    rig.run([Extend(0, 0, [1] * 16)], [(2, 4)], GREEDY)


def test_the_layers_of_gemma(tmp_path: Path) -> None:
    """Every sixth sees its whole sequence. transformers 5 writes the same in other keys."""
    config = load(tmp_path, "gemma-3-1b")
    attention = [layer.attention for layer in config.layers]
    assert [i for i, each in enumerate(attention) if each.window is None] == [5, 11, 17, 23]
    assert {each.window for each in attention} == {512, None}
    assert [config.ropes[each.rope].theta for each in attention[3:7]] == [1e4, 1e4, 1e6, 1e4]
    kinds = ["full_attention" if each.window is None else "sliding_attention" for each in attention]
    of_kinds = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    newer = load(
        tmp_path, "gemma-3-1b", layer_types=kinds, sliding_window_pattern=1, rope_parameters=of_kinds
    )
    assert newer.layers == config.layers
    assert [rope.theta for rope in newer.ropes] == [5e5, 1e4]
    assert [rope.scaling for rope in newer.ropes] == [LinearScaling(factor=8.0), None]


def test_the_text_part_of_gemma(tmp_path: Path) -> None:
    """What `text_config` leaves out is beside it, or has the defaults of transformers."""
    config = load(tmp_path, "gemma-3-4b")
    assert (config.eos_token_ids, config.dtype, config.tie_word_embeddings) == ((1, 106), "bfloat16", True)
    assert config.layers[0].attention_norm == "language_model.model.layers.0.input_layernorm.weight"
    assert [rope.scaling for rope in config.ropes] == [LinearScaling(factor=8.0), None]
    with pytest.raises(ModelError, match=r"text_config: .*tie_word_embeddings"):
        load(tmp_path, "gemma-3-4b", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"text_config: .*hidden_size"):
        load(tmp_path, "gemma-3-4b", text_config={})


def check_forwards(config: ModelConfig) -> None:
    """Native ones of tokens past the window, in chunks as at once, with a spread that random weights should have."""
    team = Team(load_library(), [-1, -1])
    weights = load_packed_weights(DummyWeights(0, CPU), config, team)
    with closing(Engine(config, NativeModel(config, weights, team), page_size=16, device=CPU)) as engine:
        whole = engine.forward({0: (0, IDS[:200])}, {})
        engine.forward({1: (0, IDS[:130])}, {})
        assert torch.equal(
            engine.forward({1: (130, IDS[130:199])}, {}), engine.forward({2: (0, IDS[:199])}, {})
        )
        assert torch.equal(engine.forward({}, {1: 199}), whole)
    assert 0.5 < whole.std() < 2


@pytest.mark.usefixtures("native_kernels")
def test_gpt_oss_runs_at_its_widths(tmp_path: Path) -> None:
    """A layer with a window and one without, with MXFP4 experts; a smaller vocabulary, and fewer experts."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = load(tmp_path, "gpt-oss-20b", vocab_size=4096, eos_token_id=0, num_local_experts=6, **layers)
    assert config.dtype == "bfloat16" and [layer.attention.window for layer in config.layers] == [128, None]
    assert config.quantization is not None and config.quantization.name == "W4A8 mxfp4"
    bits = 8 * (weights_nbytes(config, torch.bfloat16) - 2 * (2 * 4096 * 2880 + 2 * (26_542_080 + 6 * 2880)))
    assert bits / (2 * 6 * 3 * 2880 * 2880) == 4.25
    check_forwards(config)


@pytest.mark.usefixtures("native_kernels")
def test_qwen3_with_experts_runs_at_its_widths(tmp_path: Path) -> None:
    """A layer in int4; a smaller vocabulary, and fewer experts."""
    fewer = {"num_hidden_layers": 1, "num_experts": 16}
    config = load(tmp_path, "Qwen3-30B-A3B", vocab_size=4096, eos_token_id=0, **fewer)
    check_forwards(replace(config, quantization=quantize_on_load("int4")))


def test_what_scaling_makes_of_cosines(tmp_path: Path) -> None:
    """Those of Qwen2.5 grow by 0.1 ln 4 (YaRN), and those of Phi-4-mini by LongRoPE's rule for 32 times 4096."""
    yarn = load(tmp_path, "Qwen2.5-7B-YaRN").ropes[0].scaling
    assert isinstance(yarn, YarnScaling) and yarn.amplitude == pytest.approx(1.1386294)
    config = load(tmp_path, "Phi-4-mini")
    assert isinstance(config.ropes[0].scaling, LongScaling) and config.ropes[0].scaling.is_long
    assert config.ropes[0].scaling.amplitude == pytest.approx(1.1902381)
    short = config.made_for(4096).ropes[0].scaling
    assert isinstance(short, LongScaling) and not short.is_long
