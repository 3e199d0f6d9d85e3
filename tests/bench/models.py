"""Random models in Hugging Face's format with the shapes of known ones, made on the spot: speed needs no training."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shared.kernels.cpu.build import cache_folder
from tests.modelzoo import EOS_TOKEN_ID, write_tokenizer
from tests.quantized_models import compressed_tensors, quantize_folder

VOCAB_SIZE = 32_000
CONTEXT_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense decoder's sizes, all of its weights in bfloat16."""

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    qk_norm: bool = False
    vocab_size: int = VOCAB_SIZE
    context_length: int = CONTEXT_LENGTH

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(out, in) of a layer's matmuls as an engine runs them: q, k and v in one, gate and up in one."""
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
        qk_norm=True,
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
}
"""The last is no known one: it has 32 KiB of KV a token, as Llama 3.2 1B, and few weights."""


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
            "int4": lambda: compressed_tensors(4, group_size=128),
        }[weights]()
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = quantize_folder(dense, Path(scratch) / name, how)
            shutil.rmtree(made / "dense")
            made.rename(folder)
    return folder


def write_random_model(folder: Path, shape: Shape) -> None:
    """Config, weights and a tokenizer. Ids beyond the tokenizer's few hundred are tokens without a text."""
    write_configs(folder, shape)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if name.endswith("norm.weight")
        else torch.randn(size, generator=generator, dtype=torch.bfloat16) / math.sqrt(size[-1])
        for name, size in _tensors(shape)
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, vocab_size=512)


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
    }


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes as the checkpoint has them."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (q, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q)
        if shape.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{layer}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)
