from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.model.config import ModelConfig, load_model_config
from shared.model.layer_records import Attention, DenseMlp, Layer, Projection
from shared.model.rope import LinearScaling, Llama3Scaling, Rope
from tests.modelzoo import EOS_TOKEN_ID, IM_END_ID
from tests.patience import PATIENCE_S
from tests.unit.model.conftest import ModelFolder

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = Rope(
    theta=5e5,
    rotary_dim=16,
    scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
)
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def llama_layer(name: str) -> Layer:
    q, kv = f"{name}.self_attn.q_proj", {f"{name}.self_attn.{each}_proj": 32 for each in "kv"}
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=Projection({q: 64} | kv, 64),
            qk_norms=None,
            o=Projection({f"{name}.self_attn.o_proj": 64}, 64),
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=DenseMlp(
            gate_up=Projection({f"{name}.mlp.gate_proj": 128, f"{name}.mlp.up_proj": 128}, 64),
            down=Projection({f"{name}.mlp.down_proj": 64}, 128),
        ),
    )


def load(folder: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder)


def test_a_plain_llama(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=tuple(llama_layer(f"model.layers.{i}") for i in range(3)),
        rms_norm_eps=1e-5,
        ropes=(Rope(theta=10_000.0, rotary_dim=16),),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
        eos_token_ids=(),
        bos_token_id=None,
    )


def test_what_transformers_writes(model_folder: ModelFolder) -> None:
    llama3 = load_model_config(model_folder("llama3"))
    assert (llama3.ropes[0], llama3.dtype) == (LLAMA3, "float32")
    assert llama3.eos_token_ids == (EOS_TOKEN_ID, IM_END_ID)
    qwen2, qwen3 = load_model_config(model_folder("qwen2")), load_model_config(model_folder("qwen3"))
    attention = qwen2.layers[2].attention
    assert (attention.qkv.has_bias, attention.o.has_bias, attention.qk_norms) == (True, False, None)
    attention, name = qwen3.layers[2].attention, "model.layers.2.self_attn"
    assert (attention.qkv.has_bias, qwen3.head_dim) == (False, 32)
    assert attention.qk_norms == (f"{name}.q_norm.weight", f"{name}.k_norm.weight")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_ROPE},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "llama3"} | LLAMA3_ROPE, "rope_theta": 5e5, "rope_scaling": None},
    ],
    ids=["v4", "v4-type", "v5", "v5-theta-outside"],
)
def test_rope_keys_old_and_new(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert load(tmp_path, LLAMA | rope).ropes == (LLAMA3,)


def test_linear_rope(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.ropes[0].scaling == LinearScaling(factor=2.0)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_keys_old_and_new(tmp_path: Path, key: str) -> None:
    assert load(tmp_path, LLAMA | {key: "bfloat16"}).dtype == "bfloat16"


SLIDES = {"use_sliding_window": True, "sliding_window": 64}
SLIDING_TYPES = ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (LLAMA | {"sliding_window": 64}, (None, None, None)),
        (MISTRAL | {"sliding_window": 64}, (64, 64, 64)),
        (MISTRAL | {"sliding_window": 511}, (511, 511, 511)),
        (MISTRAL | {"sliding_window": 512}, (None, None, None)),
        (MISTRAL | {"sliding_window": None}, (None, None, None)),
        (MISTRAL | {"max_position_embeddings": 8192}, (4096, 4096, 4096)),
        (QWEN2 | {"sliding_window": 64, "max_window_layers": 0}, (None, None, None)),
        (QWEN2 | SLIDES | {"max_window_layers": 2}, (None, None, 64)),
        (QWEN3 | SLIDES | {"max_window_layers": 3}, (None, None, None)),
        (QWEN3 | SLIDES | {"layer_types": SLIDING_TYPES}, (None, 64, 64)),
        (QWEN3_MOE | {"sliding_window": 64}, (None, None, None)),
        (QWEN3_MOE | SLIDES, (64, 64, 64)),
    ],
    ids=[
        "llama",
        "mistral",
        "mistral-nearly-all",
        "mistral-all",
        "mistral-null",
        "mistral-absent",
        "qwen-off",
        "qwen-on",
        "qwen-no-layer",
        "qwen-layer-types",
        "qwen-moe-off",
        "qwen-moe-on",
    ],
)
def test_windows_of_layers(tmp_path: Path, fields: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    """A window as long as the context is none."""
    config = load(tmp_path, fields)
    assert tuple(layer.attention.window for layer in config.layers) == expected
    assert not any(layer.attention.window for layer in config.made_for(64).layers)


@pytest.mark.parametrize(
    "types", [SLIDING_TYPES[:2], ["full_attention", "chunked_attention", "full_attention"]]
)
def test_layer_types_that_cannot_be(tmp_path: Path, types: list[str]) -> None:
    with pytest.raises(ModelError, match=r"config\.json: .*layer_types"):
        load(tmp_path, QWEN3 | SLIDES | {"layer_types": types})


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2], {"eos_token_id": [2, 7]}, (5, 2, 7)),
        (None, {"eos_token_id": 3}, (3,)),
        (0, {}, (0,)),
    ],
    ids=["one", "union", "generation-only", "zero"],
)
def test_eos_token_ids_are_the_union_of_both_files(
    tmp_path: Path, eos: object, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert load(tmp_path, LLAMA | {"eos_token_id": eos}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"architectures": ["GPTNeoXForCausalLM"]},
            ["GPTNeoXForCausalLM", "LlamaForCausalLM, MistralForCausalLM"],
        ),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": ["Qwen3NextForCausalLM"]}, ["recurrent state", "nearest", "is Qwen3ForCausalLM"]),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, ["Qwen3_5", "recurrent state"]),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, ["DeepseekV3ForCausalLM", "latent"]),
        ({"architectures": ["KimiLinearForCausalLM"]}, ["recurrent state"]),
        ({"architectures": ["KimiK25ForConditionalGeneration"]}, ["latent"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantization_config", "bitsandbytes"]),
        ({"hidden_size": "64"}, ["hidden_size", "str"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"vocab_size": -1}, ["vocab_size"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"num_attention_heads": 6}, ["num_attention_heads"]),
        ({"head_dim": 15}, ["head_dim"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rms_norm_eps": 2.0}, ["rms_norm_eps"]),
        ({"rope_theta": 1.0}, ["rope_theta"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
        ({"eos_token_id": 512}, ["eos_token_id", "512"]),
        ({"eos_token_id": ["</s>"]}, ["eos_token_id"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "16"]),
        ({"partial_rotary_factor": 0.0}, ["partial_rotary_factor", "0.0 of 16"]),
        ({"partial_rotary_factor": 1e308}, ["partial_rotary_factor", "1e+308 of 16"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.45}}, ["partial_rotary_factor", "0.45"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e7}}, ["rope_scaling", "factor", "134217728"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling", "factor"]),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, ["rope_scaling", "dynamic"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
            ["rope_parameters", "short_factor"],
        ),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.0] * 8, "short_factor": [1.0] * 7}},
            ["rope_scaling", "short_factor must have 8"],
        ),
        ({"rope_scaling": {"rope_type": "mrope"}}, ["rope_scaling", "mrope", "default, linear"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling", "low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, ["rope_scaling", ">= 1e-09", "factor"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": -1e308}}, ["rope_scaling", "mscale"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["rope_parameters"]),
        (
            {"rope_scaling": LLAMA3_ROPE | {"rope_type": "llama3", "low_freq_factor": 4.0}},
            ["low_freq_factor"],
        ),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "null"]),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "null"]),
        (GEMMA3 | {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "causal"]),
        (GEMMA3 | {"hidden_activation": "relu"}, ["hidden_activation", "relu"]),
        (GEMMA3 | {"sliding_window": None}, ["sliding_window"]),
        (GEMMA3 | {"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers is 3"]),
        (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "rope_type"]),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            ["rope_parameters.sliding_attention", "factor"],
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ModelError) as error:
        load(tmp_path, LLAMA | change)
    for name in ["config.json", *named]:
        assert name in str(error.value)


@pytest.mark.parametrize("field", sorted(LLAMA.keys() - {"num_key_value_heads"}))
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{field}"):
        load(tmp_path, {key: value for key, value in LLAMA.items() if key != field})


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"a":' * 10_000],
    ids=["empty", "cut", "array", "not-utf8", "deep"],
)
def test_a_malformed_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_malformed_generation_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json.*eos_token_id"):
        load(tmp_path, LLAMA, {"eos_token_id": "</s>"})


def test_the_router_can_import_it_without_torch() -> None:
    code = """
import shared.model.config, shared.model.files, sys
shared.model.config.families()
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
