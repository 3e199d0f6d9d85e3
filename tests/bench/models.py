"""Random models in Hugging Face's format with the shapes of known ones, made on the spot: speed needs no training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shared.kernels.cpu.build import cache_folder
from shared.model.config import ModelConfig, load_model_config
from shared.model.dummy_weights import DummyWeights
from shared.model.layer_records import ExpertsMlp
from shared.model.weights import tensor_specs, weights_nbytes
from tests.modelzoo import EOS_TOKEN_ID, write_tokenizer
from tests.quantized_models import compressed_tensors, quantize_folder

VOCAB_SIZE = 32_000
CONTEXT_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes. Its weights are in bfloat16, unless `fields` have another type."""

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    vocab_size: int = VOCAB_SIZE
    context_length: int = CONTEXT_LENGTH
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What else is in config.json."""

    @property
    def shipped(self) -> str | None:
        """The type of weights that are shipped quantized."""
        method: str | None = self.fields.get("quantization_config", {}).get("quant_method")
        return method

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(out, in) of a dense layer's matmuls as an engine runs them: q, k and v in one, gate and up in one."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (q + 2 * kv, self.hidden_size),
            (self.hidden_size, q),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]

    @property
    def linear_flops(self) -> int:
        """Of one token through all layers, without lm_head."""
        return self.num_layers * sum(2 * n * k for n, k in self.linears)

    @property
    def lm_head_flops(self) -> int:
        """Of one row of logits."""
        return 2 * self.vocab_size * self.hidden_size

    def attention_flops(self, start: int, length: int) -> int:
        """Of tokens [start, start + length) of one sequence, each over all up to itself, in all layers."""
        num_pairs = length * start + length * (length + 1) // 2
        return self.num_layers * 4 * self.num_heads * self.head_dim * num_pairs

    @property
    def weight_nbytes(self) -> int:
        """What a decode step reads of the weights: all layers and lm_head, once."""
        return self.linear_flops + self.lm_head_flops  # two bytes and two operations a weight

    @property
    def kv_nbytes(self) -> int:
        """Of one token's K and V in all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


SHAPES = {
    "llama-160m": Shape(
        architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        intermediate_size=3072,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": Shape(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "llama-4-layers": Shape(
        architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=512,
        num_layers=4,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        intermediate_size=1536,
        tie_word_embeddings=True,
    ),
    # https://huggingface.co/Qwen/Qwen2.5-1.5B/blob/main/config.json has a vocabulary of 151,936.
    "qwen2.5-1.5b": Shape(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=8960,
        tie_word_embeddings=True,
    ),
    # https://huggingface.co/google/gemma-3-1b-it/blob/main/config.json has a vocabulary of 262,144.
    "gemma-3-1b": Shape(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        hidden_size=1152,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        intermediate_size=6912,
        tie_word_embeddings=True,
        fields={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json has 48 layers and a vocabulary of 151,936.
    "qwen3-30b-a3b-like": Shape(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        hidden_size=2048,
        num_layers=4,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        tie_word_embeddings=False,
        vocab_size=12_672,
        fields={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json has 24 layers and a vocabulary of 201,088.
    "gpt-oss-20b-like": Shape(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        hidden_size=2880,
        num_layers=2,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        tie_word_embeddings=False,
        vocab_size=16_768,
        fields={
            "attention_bias": True,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": CONTEXT_LENGTH,
                "truncate": False,
            },
            "rope_theta": 150_000.0,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        },
    ),
}
"""llama-4-layers is no known one: it has 32 KiB of KV a token, as Llama 3.2 1B, and few weights. The mixtures have a
twelfth of their layers and of their vocabulary, since converters hold a model three times."""


def random_model(name: str) -> Path:
    """The folder of a model with the shape `name`, made in the user's cache if it is not there yet."""
    folder = cache_folder() / "bench-models" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / name
            made.mkdir()
            write_random_model(made, SHAPES[name])
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # else somebody has just made it
                    raise
    return folder


def quantized_model(name: str, weights: str) -> Path:
    """The same model as compressed-tensors W8A8 (`int8`), or W4A16 in groups of 128 (`int4`)."""
    dense = random_model(name)
    folder = dense.with_name(f"{name}-{weights}")
    if not folder.exists():
        how = {
            "int8": lambda: compressed_tensors(8, activations=True),
            "int4": lambda: compressed_tensors(4, group_size=128, ignore=("lm_head", "re:.*gate$")),
        }[weights]()
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            quantize_folder(dense, Path(scratch) / name, how, keep_dense=False).rename(folder)
    return folder


def write_random_model(folder: Path, shape: Shape) -> None:
    """Config, weights and a tokenizer. Ids beyond the tokenizer's few hundred are tokens without a text."""
    write_configs(folder, shape)
    source, specs = DummyWeights(0, torch.device("cpu")), tensor_specs(load_model_config(folder))
    source.check(specs)
    weights = {}
    for name, spec in specs.items():
        dtype = torch.uint8 if source.dtype(name) is torch.uint8 else torch.bfloat16
        weights[name] = torch.empty(spec.shape, dtype=dtype)
        source.copy_tensor(name, weights[name], lambda num_elements: None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, vocab_size=512)


def read_nbytes(config: ModelConfig, context: int) -> int:
    """What a decode step of one stream reads: the weights that its token goes through, and the KV of what it sees."""

    def chosen(mlp: Any) -> Any:
        return replace(mlp, experts=mlp.experts[: mlp.top_k]) if isinstance(mlp, ExpertsMlp) else mlp

    size = torch.bfloat16.itemsize
    read = replace(config, layers=tuple(replace(layer, mlp=chosen(layer.mlp)) for layer in config.layers))
    embed = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * size
    seen = sum(min(context, layer.attention.window or context) for layer in config.layers)
    kv = 2 * config.num_kv_heads * config.head_dim * size * seen
    return weights_nbytes(read, torch.bfloat16) - embed + kv


def write_configs(folder: Path, shape: Shape) -> None:
    """All that random weights by seed (`--load-format dummy`) need."""
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_length,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "bos_token_id": EOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **shape.fields,
    }
