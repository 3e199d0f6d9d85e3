"""Reads the config of a Hugging Face model folder: `load_model_config(folder) -> ModelConfig`.

config.json and generation_config.json may be written by transformers 4 or 5. A file of `shared/model/models` says
which keys an architecture has and what its layers are. A setting that Baton would compute wrongly is refused with its
name. The router imports this file, so this file never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ModelError
from shared.model.config_fields import ConfigFields, Factor, Positions, TokenIds, convert, decode_file
from shared.model.layer_records import Heads, Layer
from shared.model.models import families
from shared.model.quantization import Quantization, read_quantization

_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """Position interpolation: every frequency is divided by `factor` (arXiv 2306.15595)."""

    factor: Factor


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """The scaling of Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp in between."""

    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Positions


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The config of one model. Sizes are in elements. `head_dim * num_heads` may differ from `hidden_size`.

    `dtype` is that of the checkpoint: float32, float16 or bfloat16. `sliding_window` is None unless a layer uses
    it. `eos_token_ids` has the ids of config.json, then those of generation_config.json. It is empty where neither
    has one.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_window: int | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Quantization | None = None

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def widths(self) -> frozenset[int]:
        """The numbers of inputs of the layers' projections."""
        return frozenset(each.num_inputs for layer in self.layers for each in layer.projections)

    @property
    def context_length(self) -> int:
        """Most tokens of a Req, prompt and output together.

        Sliding-window attention is not implemented. Within one window it equals full attention, so a window limits
        the context instead.
        """
        if self.sliding_window is None:
            return self.max_position_embeddings
        return min(self.max_position_embeddings, self.sliding_window)


class _Identity(msgspec.Struct, kw_only=True):
    """The keys that decide whether this file can read the others."""

    architectures: list[str]
    quantization_config: dict[str, Any] | None = None


class _RopeFields(msgspec.Struct, kw_only=True):
    """The fields of every rope type. The other fields of a type are in its dataclass above."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Factor | None = None
    partial_rotary_factor: float | None = None


class _GenerationFields(msgspec.Struct, kw_only=True):
    eos_token_id: TokenIds = None


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a model folder, and generation_config.json where there is one.

    Raises ModelError, which names the file and the field, for a field that is missing, has the wrong type or is out
    of range, and for an architecture, rope type or quantization that is not supported.
    """
    path = folder / "config.json"
    identity = decode_file(path, _Identity)
    architecture = identity.architectures[0] if identity.architectures else "(an empty list)"
    supported = families()
    if architecture not in supported:
        raise ModelError(
            f"{path}: architectures: {architecture} is not supported; supported are {', '.join(supported)}"
        )
    family, quantization = supported[architecture], identity.quantization_config
    fields = decode_file(path, family.fields)
    heads = _heads(fields, path)
    rope_theta, rope_scaling = _rope(fields, path)
    return ModelConfig(
        architecture=architecture,
        model_type=fields.model_type,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        layers=tuple(family.layer(fields, heads, i) for i in range(fields.num_hidden_layers)),
        rms_norm_eps=fields.rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=fields.max_position_embeddings,
        tie_word_embeddings=fields.tie_word_embeddings,
        sliding_window=family.sliding_window(fields),
        dtype=_dtype(fields, path),
        eos_token_ids=_eos_token_ids(fields, folder),
        bos_token_id=fields.bos_token_id,
        quantization=None if quantization is None else read_quantization(quantization, path),
    )


def _heads(fields: ConfigFields, path: Path) -> Heads:
    num_heads = fields.num_attention_heads
    num_kv_heads = fields.num_key_value_heads or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{path}: num_key_value_heads: {num_kv_heads} does not divide num_attention_heads ({num_heads})"
        )
    head_dim, rest = divmod(fields.hidden_size, num_heads)
    if fields.head_dim is None and (rest or head_dim % 2):
        raise ModelError(
            f"{path}: hidden_size: {fields.hidden_size} is no even multiple of num_attention_heads "
            f"({num_heads}), and there is no head_dim"
        )
    return Heads(num_heads, num_kv_heads, fields.head_dim or head_dim)


def _rope(fields: ConfigFields, path: Path) -> tuple[float, Llama3RopeScaling | LinearRopeScaling | None]:
    # transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters. With both, rope_scaling wins.
    key = "rope_scaling" if fields.rope_scaling else "rope_parameters"
    raw = fields.rope_scaling or fields.rope_parameters or {}
    if "full_attention" in raw or "sliding_attention" in raw:
        raise ModelError(f"{path}: {key}: rotary parameters per layer type are not supported")
    rope = convert(raw, _RopeFields, path, key)
    if not all(
        factor in (None, 1.0) for factor in (rope.partial_rotary_factor, fields.partial_rotary_factor)
    ):
        raise ModelError(f"{path}: partial_rotary_factor: only 1.0 is supported")

    theta = rope.rope_theta or fields.rope_theta or _DEFAULT_ROPE_THETA
    match rope.rope_type or rope.type or "default":
        case "default":
            return theta, None
        case "linear":
            return theta, convert(raw, LinearRopeScaling, path, key)
        case "llama3":
            original = {"original_max_position_embeddings": fields.max_position_embeddings}
            scaling = convert(original | raw, Llama3RopeScaling, path, key)
            if scaling.low_freq_factor >= scaling.high_freq_factor:
                raise ModelError(f"{path}: {key}: low_freq_factor must be below high_freq_factor")
            return theta, scaling
        case other:
            supported = "default, linear, llama3"
            raise ModelError(f"{path}: {key}: rope type {other} is not supported; supported are {supported}")


def _dtype(fields: ConfigFields, path: Path) -> str:
    dtype = fields.dtype or fields.torch_dtype or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ModelError(f"{path}: dtype: {dtype} is not supported; supported are float32, float16, bfloat16")
    return dtype


def _eos_token_ids(fields: ConfigFields, folder: Path) -> tuple[int, ...]:
    generation_path = folder / "generation_config.json"
    generation = (
        decode_file(generation_path, _GenerationFields) if generation_path.exists() else _GenerationFields()
    )
    found: list[int] = []
    for path, ids in (
        (folder / "config.json", fields.eos_token_id),
        (generation_path, generation.eos_token_id),
    ):
        for token_id in [ids] if isinstance(ids, int) else ids or []:
            if token_id >= fields.vocab_size:
                raise ModelError(
                    f"{path}: eos_token_id: {token_id} is outside the vocabulary of {fields.vocab_size}"
                )
            if token_id not in found:
                found.append(token_id)
    return tuple(found)
