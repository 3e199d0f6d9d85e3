"""Mixtures of experts against transformers, with the switches of their configs drawn, and what is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shared.errors import ModelError
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.dummy_weights import DummyWeights
from shared.model.experts import route
from shared.model.layer_records import ExpertsMlp
from shared.model.linear import DenseLinear, QuantizedLinear
from shared.model.quantization import quantize_on_load
from shared.model.weights import ExpertsWeights, load_weights
from tests.modelzoo import MIXTURES, make_model, random_prompt, reference_logits
from tests.quantized_models import Quantize, awq, compressed_tensors, fp8, gptq, quantize_folder
from tests.unit.model.test_decoder import CPU, load, logits_in_chunks

WIDE: dict[str, dict[str, Any]] = {
    "qwen3moe": {"moe_intermediate_size": 96, "mlp_only_layers": []},
    "mixtral": {},
}
"""Widths that are multiples of the groups."""


LAYER_TYPES = st.sampled_from(["full_attention", "sliding_attention"])
CLAMPS = st.sampled_from([0.5, 2.0, 7.0])


@st.composite
def switches(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    num_experts = draw(st.integers(1, 20))
    chosen: dict[str, Any] = {
        "num_local_experts" if architecture in ("mixtral", "gptoss") else "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, min(num_experts, 6))),
        "num_hidden_layers": 4,
        "intermediate_size": draw(st.sampled_from([40, 96])),
        "num_key_value_heads": draw(st.sampled_from([1, 4])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if architecture != "mixtral":
        chosen["attention_bias"] = draw(st.booleans())
    if architecture in ("qwen3moe", "olmoe"):
        chosen["norm_topk_prob"] = draw(st.booleans())
    if architecture == "gptoss":
        chosen["layer_types"] = draw(st.none() | st.lists(LAYER_TYPES, min_size=4, max_size=4))
        chosen["sliding_window"] = draw(st.sampled_from([1, 11, 29, 30, 60]))
        chosen["swiglu_limit"], chosen["swiglu_alpha"] = draw(CLAMPS), draw(st.sampled_from([1.0, 1.702]))
    if architecture == "qwen3moe":
        chosen["decoder_sparse_step"] = draw(st.sampled_from([1, 2, 3]))
        chosen["mlp_only_layers"] = draw(st.lists(st.integers(0, 3), max_size=3, unique=True))
    return chosen


@pytest.mark.parametrize("architecture", MIXTURES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_logits_equal_those_of_transformers(architecture: str, data: st.DataObject) -> None:
    changes = data.draw(switches(architecture))
    with tempfile.TemporaryDirectory() as name:
        folder, ids = make_model(Path(name), architecture, **changes), random_prompt(30, seed=1)
        config = load_model_config(folder)
        sparse = [isinstance(layer.mlp, ExpertsMlp) for layer in config.layers]
        step, dense = changes.get("decoder_sparse_step", 1), changes.get("mlp_only_layers", [])
        assert sparse == [(i + 1) % step == 0 and i not in dense for i in range(4)]
        logits = logits_in_chunks(load(folder), ids, [7, 16, 1, 1, 5])
        torch.testing.assert_close(logits, reference_logits(folder, ids), atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        ("qwen3moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8 experts"),
        ("qwen3moe", {"num_local_experts": None}, "num_experts: is missing"),
        ("qwen3moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        (
            "olmoe",
            {"num_hidden_layers": 1024, "num_experts": 4096},
            "num_experts: 4096 .* 1024 .* 65536 in all",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gptoss", {"layer_types": ["full_attention"]}, "layer_types: has 1 layers"),
        ("gptoss", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("gptoss", {"rope_parameters": None}, "rope_scaling: is missing"),
        ("gptoss", {"hidden_act": "gelu"}, "hidden_act"),
        ("gptoss", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("gptoss", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 6 experts"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, architecture: str, change: dict[str, Any], named: str
) -> None:
    path = make_model(tmp_path, architecture) / "config.json"
    assert load_model_config(tmp_path).layers[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=named):
        load_model_config(tmp_path)


FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Quantize]]] = {
    "w4a16-g32": lambda: compressed_tensors(4, group_size=32, ignore=("lm_head", "re:.*gate$")),
    "w8a8": lambda: compressed_tensors(8, activations=True),
    "awq": lambda: awq(32),
    "gptq-order": lambda: gptq(4, 32, desc_act=True),
    "fp8-block": lambda: fp8("block"),
}


@pytest.mark.parametrize("architecture", ["qwen3moe", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_read_from_quantized_files(tmp_path: Path, architecture: str, name: str) -> None:
    dense = make_model(tmp_path / "dense", architecture, dtype="bfloat16", **WIDE[architecture])
    folder = quantize_folder(dense, tmp_path / "quantized", FORMATS[name]())
    stands_for = load_file(folder / "dense" / "model.safetensors")
    mlp = load(folder, torch.bfloat16).weights.layers[0].mlp
    record = load_model_config(folder).layers[0].mlp
    assert isinstance(mlp, ExpertsWeights) and isinstance(record, ExpertsMlp)
    assert isinstance(mlp.router, DenseLinear)
    for weights, expert in zip(mlp.experts, record.experts, strict=True):
        for linear, projection in ((weights.gate_up_proj, expert.gate_up), (weights.down_proj, expert.down)):
            wanted = torch.cat([stands_for[f"{each}.weight"] for each in projection.outputs])
            if isinstance(linear, DenseLinear):
                assert name == "fp8-block" and torch.equal(linear.weight_NK, wanted.bfloat16())
            else:
                assert torch.equal(linear.dequantized(), wanted.float())


@pytest.mark.parametrize("architecture", ["olmoe", "gptoss"])
def test_the_router_is_not_quantized_while_loading_and_experts_are(tmp_path: Path, architecture: str) -> None:
    config = load_model_config(make_model(tmp_path, architecture))
    config = replace(config, quantization=quantize_on_load("int4"))
    weights = load_weights(Checkpoint(tmp_path), config, dtype=torch.bfloat16, device=CPU)
    mlp = weights.layers[0].mlp
    assert isinstance(mlp, ExpertsWeights) and isinstance(mlp.router, DenseLinear)
    dense = load(tmp_path).weights.layers[0].mlp
    assert isinstance(dense, ExpertsWeights)
    for quantized, expert in zip(mlp.experts, dense.experts, strict=True):
        for one, of in (
            (quantized.gate_up_proj, expert.gate_up_proj),
            (quantized.down_proj, expert.down_proj),
        ):
            assert isinstance(one, QuantizedLinear) and isinstance(of, DenseLinear)
            assert (one.dequantized() - of.weight_NK).abs().mean() < 0.15 * of.weight_NK.std()


def test_experts_that_are_quantized_differently_are_refused(tmp_path: Path) -> None:
    ignored = "model.layers.2.mlp.experts.5.down_proj"
    dense = make_model(tmp_path / "dense", "qwen3moe", **WIDE["qwen3moe"])
    how = compressed_tensors(8, ignore=("lm_head", ignored))
    folder = quantize_folder(dense, tmp_path / "quantized", how)
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.experts\.0\.down_proj"):
        load(folder)


def test_random_weights_spread_tokens_over_experts_that_differ(tmp_path: Path) -> None:
    config = load_model_config(make_model(tmp_path, "olmoe"))
    weights = load_weights(DummyWeights(0, CPU), config, dtype=torch.float32, device=CPU)
    mlp = weights.layers[0].mlp
    assert isinstance(mlp, ExpertsWeights) and isinstance(mlp.router, DenseLinear)
    first, second = (each.down_proj for each in mlp.experts[:2])
    assert isinstance(first, DenseLinear) and isinstance(second, DenseLinear)
    assert not torch.equal(first.weight_NK, second.weight_NK)
    x_TD = torch.randn(200, config.hidden_size, generator=torch.Generator().manual_seed(0))
    chosen_TK, _ = route(mlp.router.multiply(x_TD), mlp.top_k, is_normalized=False)
    assert chosen_TK.flatten().bincount(minlength=8).min() > 200 * 3 / 8 / 3
