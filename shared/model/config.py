"""Reads the config of a Hugging Face model folder: `load_model_config(folder) -> ModelConfig`.

config.json and generation_config.json may be written by transformers 4 or 5. A setting that Baton would compute
wrongly is refused with its name. The router imports this file, so this file never imports torch.

All models are one dense decoder with five switches. Other keys do not change what is computed:

    architecture         qkv_bias         o_bias           mlp_bias   qk_norm   sliding window
    LlamaForCausalLM     attention_bias   attention_bias   mlp_bias   no        never
    MistralForCausalLM   no               no               no         no        sliding_window
    Qwen2ForCausalLM     yes              no               no         no        if use_sliding_window
    Qwen3ForCausalLM     attention_bias   attention_bias   no         yes       if use_sliding_window
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from shared.errors import ModelError
from shared.model.quantization import Quantization, read_quantization

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# The defaults of transformers. A wrong value here would not show in the shape of any tensor.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128

Factor = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Positions = Annotated[int, msgspec.Meta(gt=0, le=2**27)]
Width = Annotated[int, msgspec.Meta(gt=0, le=2**22)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
TokenIds = TokenId | list[TokenId] | None

T = TypeVar("T")


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
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Quantization | None = None

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
    compression_config: dict[str, Any] | None = None
    """Its name in files of the first versions of compressed-tensors."""


class _RopeFields(msgspec.Struct, kw_only=True):
    """The fields of every rope type. The other fields of a type are in its dataclass above."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Factor | None = None
    partial_rotary_factor: float | None = None


class _ConfigFields(msgspec.Struct, kw_only=True):
    model_type: str
    vocab_size: Annotated[int, msgspec.Meta(gt=0, le=2**24)]
    hidden_size: Width
    num_hidden_layers: Annotated[int, msgspec.Meta(gt=0, le=2**10)]
    num_attention_heads: Annotated[int, msgspec.Meta(gt=0, le=2**12)]
    num_key_value_heads: Annotated[int, msgspec.Meta(gt=0, le=2**12)] | None = None
    head_dim: Annotated[int, msgspec.Meta(gt=0, le=2**12, multiple_of=2)] | None = None
    intermediate_size: Width
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    max_position_embeddings: Positions
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Factor | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    use_sliding_window: bool = False
    sliding_window: Positions | None = _DEFAULT_SLIDING_WINDOW
    max_window_layers: int = _DEFAULT_MAX_WINDOW_LAYERS
    layer_types: list[str] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenIds = None


class _GenerationFields(msgspec.Struct, kw_only=True):
    eos_token_id: TokenIds = None


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a model folder, and generation_config.json where there is one.

    Raises ModelError, which names the file and the field, for a field that is missing, has the wrong type or is out
    of range, and for an architecture, rope type or quantization that is not supported.
    """
    path = folder / "config.json"
    architecture, quantization = _identity(path)
    fields = _decode(path, _ConfigFields)
    rope_theta, rope_scaling = _rope(fields, path)
    optional_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.attention_bias
    return ModelConfig(
        architecture=architecture,
        model_type=fields.model_type,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=_num_kv_heads(fields, path),
        head_dim=_head_dim(fields, architecture, path),
        intermediate_size=fields.intermediate_size,
        rms_norm_eps=fields.rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=fields.max_position_embeddings,
        tie_word_embeddings=fields.tie_word_embeddings,
        qkv_bias=optional_bias or architecture == "Qwen2ForCausalLM",
        o_bias=optional_bias,
        mlp_bias=fields.mlp_bias and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(fields, architecture),
        dtype=_dtype(fields, path),
        eos_token_ids=_eos_token_ids(fields, folder),
        bos_token_id=fields.bos_token_id,
        quantization=None if quantization is None else read_quantization(quantization, path),
    )


def _decode(path: Path, fields: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=fields)
    except OSError as e:
        raise ModelError(f"{path}: cannot be read ({e.strerror}); a model folder needs this file") from e
    except msgspec.DecodeError as e:
        raise ModelError(f"{path}: {e}") from e


def _convert(raw: dict[str, Any], fields: type[T], path: Path, key: str) -> T:
    try:
        return msgspec.convert(raw, type=fields)
    except msgspec.ValidationError as e:
        raise ModelError(f"{path}: {key}: {e}") from e


def _identity(path: Path) -> tuple[str, dict[str, Any] | None]:
    """The architecture, and what says how it is quantized."""
    identity = _decode(path, _Identity)
    architecture = identity.architectures[0] if identity.architectures else "(an empty list)"
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{path}: architectures: {architecture} is not supported; supported are {supported}")
    return architecture, identity.quantization_config or identity.compression_config


def _num_kv_heads(fields: _ConfigFields, path: Path) -> int:
    num_kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if fields.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"{path}: num_key_value_heads: {num_kv_heads} does not divide num_attention_heads "
            f"({fields.num_attention_heads})"
        )
    return num_kv_heads


def _head_dim(fields: _ConfigFields, architecture: str, path: Path) -> int:
    if fields.head_dim is not None:
        return fields.head_dim
    if architecture == "Qwen3ForCausalLM":
        return _QWEN3_HEAD_DIM
    head_dim, rest = divmod(fields.hidden_size, fields.num_attention_heads)
    if rest or head_dim % 2:
        raise ModelError(
            f"{path}: hidden_size: {fields.hidden_size} is no even multiple of num_attention_heads "
            f"({fields.num_attention_heads}), and there is no head_dim"
        )
    return head_dim


def _rope(fields: _ConfigFields, path: Path) -> tuple[float, Llama3RopeScaling | LinearRopeScaling | None]:
    # transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters. With both, rope_scaling wins.
    key = "rope_scaling" if fields.rope_scaling else "rope_parameters"
    raw = fields.rope_scaling or fields.rope_parameters or {}
    if "full_attention" in raw or "sliding_attention" in raw:
        raise ModelError(f"{path}: {key}: rotary parameters per layer type are not supported")
    rope = _convert(raw, _RopeFields, path, key)
    if not all(
        factor in (None, 1.0) for factor in (rope.partial_rotary_factor, fields.partial_rotary_factor)
    ):
        raise ModelError(f"{path}: partial_rotary_factor: only 1.0 is supported")

    theta = rope.rope_theta or fields.rope_theta or _DEFAULT_ROPE_THETA
    match rope.rope_type or rope.type or "default":
        case "default":
            return theta, None
        case "linear":
            return theta, _convert(raw, LinearRopeScaling, path, key)
        case "llama3":
            original = {"original_max_position_embeddings": fields.max_position_embeddings}
            scaling = _convert(original | raw, Llama3RopeScaling, path, key)
            if scaling.low_freq_factor >= scaling.high_freq_factor:
                raise ModelError(f"{path}: {key}: low_freq_factor must be below high_freq_factor")
            return theta, scaling
        case other:
            supported = "default, linear, llama3"
            raise ModelError(f"{path}: {key}: rope type {other} is not supported; supported are {supported}")


def _sliding_window(fields: _ConfigFields, architecture: str) -> int | None:
    match architecture:
        case "LlamaForCausalLM":
            slides = False
        case "MistralForCausalLM":
            slides = True
        case _ if fields.layer_types is not None:
            slides = fields.use_sliding_window and "sliding_attention" in fields.layer_types
        case _:
            slides = fields.use_sliding_window and fields.num_hidden_layers > fields.max_window_layers
    return fields.sliding_window if slides else None


def _dtype(fields: _ConfigFields, path: Path) -> str:
    dtype = fields.dtype or fields.torch_dtype or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ModelError(f"{path}: dtype: {dtype} is not supported; supported are float32, float16, bfloat16")
    return dtype


def _eos_token_ids(fields: _ConfigFields, folder: Path) -> tuple[int, ...]:
    generation_path = folder / "generation_config.json"
    generation = (
        _decode(generation_path, _GenerationFields) if generation_path.exists() else _GenerationFields()
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
