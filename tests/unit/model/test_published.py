"""Configs as they are published, written by hand: what is read of them, and a forward at their widths and one layer.

Weights and activations are on torch's meta device, which has shapes alone. The numbers of parameters are those of the
models' cards.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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


class Published(NamedTuple):
    fields: dict[str, Any]
    num_parameters: float
    context_length: int


LONG_FACTOR = [
    *(
        1.0,
        1.118320672,
        1.250641126,
        1.398617824,
        1.564103225,
        1.74916897,
        1.956131817,
        2.187582649,
        2.446418898,
    ),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(
        16.37415215,
        18.31155283,
        20.47818807,
        22.90118105,
        25.61086418,
        28.64115884,
        32.03,
        32.1,
        32.13,
        32.23,
    ),
    *(32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
MODELS = {
    # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
    "Llama-3.1-8B": Published(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        8.03e9,
        131072,
    ),
    # https://huggingface.co/Qwen/Qwen2.5-7B-Instruct: config.json, with the rope_scaling that its card gives
    "Qwen2.5-7B-YaRN": Published(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        7.61e9,
        131072,
    ),
    # https://huggingface.co/microsoft/Phi-4-mini-instruct/blob/main/config.json
    "Phi-4-mini": Published(
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "bos_token_id": 199999,
            "eos_token_id": 199999,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"long_factor": LONG_FACTOR, "short_factor": [1.0] * 48, "type": "longrope"},
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 200064,
        },
        3.84e9,
        131072,
    ),
    # https://huggingface.co/zai-org/GLM-4-9B-0414/blob/main/config.json
    "GLM-4-9B-0414": Published(
        {
            "architectures": ["Glm4ForCausalLM"],
            "model_type": "glm4",
            "attention_bias": True,
            "eos_token_id": [151329, 151336, 151338],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 151552,
        },
        9.4e9,
        32768,
    ),
    # https://huggingface.co/google/gemma-3-1b-it/blob/main/config.json
    "gemma-3-1b": Published(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "vocab_size": 262144,
        },
        1.0e9,
        32768,
    ),
    # https://huggingface.co/google/gemma-3-4b-it/blob/main/config.json
    "gemma-3-4b": Published(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "patch_size": 14},
        },
        3.88e9,  # of text
        131072,
    ),
    # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json
    "gpt-oss-20b": Published(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "eos_token_id": 200002,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "quantization_config": {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        },
        20.9e9,
        131072,
    ),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "Qwen3-30B-A3B": Published(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        30.5e9,
        40960,
    ),
}
MIXTURES = ("gpt-oss-20b", "Qwen3-30B-A3B")


def load(folder: Path, name: str, **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(MODELS[name].fields | changes))
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
    fields = MODELS[name].fields
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
    """A layer with a window and one without, with MXFP4 experts; a smaller vocabulary."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = load(tmp_path, "gpt-oss-20b", vocab_size=4096, eos_token_id=0, **layers)
    assert config.dtype == "bfloat16" and [layer.attention.window for layer in config.layers] == [128, None]
    assert config.quantization is not None and config.quantization.name == "W4A8 mxfp4"
    bits = 8 * (weights_nbytes(config, torch.bfloat16) - 2 * (2 * 4096 * 2880 + 2 * (26_542_080 + 32 * 2880)))
    assert bits / (2 * 32 * 3 * 2880 * 2880) == 4.25
    check_forwards(config)


@pytest.mark.usefixtures("native_kernels")
def test_qwen3_with_experts_runs_at_its_widths(tmp_path: Path) -> None:
    """A layer in int4; a smaller vocabulary."""
    config = load(tmp_path, "Qwen3-30B-A3B", vocab_size=4096, eos_token_id=0, num_hidden_layers=1)
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
