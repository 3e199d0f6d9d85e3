"""Reads the config of a Hugging Face model folder: `load_model_config(folder) -> ModelConfig`.

config.json and generation_config.json may be written by transformers 4 or 5. A file of `shared/model/models` says
which keys an architecture has and what its layers are. A setting that Baton would compute wrongly is refused with its
name. The router imports this file, so this file never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ModelError
from shared.model.config_fields import ConfigFields, TokenIds, convert, decode_file
from shared.model.family import F, Family
from shared.model.layer_records import ExpertsMlp, Heads, Layer
from shared.model.models import families
from shared.model.quantization import Quantization, read_quantization
from shared.model.rope import Rope, read_ropes

_RECURRENT = " (it has layers with a recurrent state)"
_LATENT = " (its attention keeps a latent vector in place of keys and values)"
_OTHER_STATES = {
    "Qwen3_5": _RECURRENT,
    "Qwen3Next": _RECURRENT,
    "KimiLinear": _RECURRENT,
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "Kimi": _LATENT,
}
"""How the names of architectures begin that keep something else than the keys and values of each token."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The config of one model. Sizes are in elements. `head_dim * num_heads` may differ from `hidden_size`.

    `max_position_embeddings` is the length that rope scaling makes of it. `dtype` is that of the checkpoint: float32,
    float16 or bfloat16. `eos_token_ids` has the ids of config.json, then those of generation_config.json. It is empty
    where neither has one.
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
    ropes: tuple[Rope, ...]
    """Of which each layer has one."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Quantization | None = None
    embed_scale: float = 1.0
    """What multiplies embeddings, before it is rounded to their type."""
    norms_add_one: bool = False
    """Whether norms multiply by 1 + their weight, in float32."""
    prefix: str = ""
    """What the names of tensors begin with. That of an lm_head that is not tied does not."""

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture of experts."""
        return any(isinstance(layer.mlp, ExpertsMlp) for layer in self.layers)

    @property
    def widths(self) -> frozenset[int]:
        """The numbers of inputs of the layers' projections."""
        return frozenset(each.num_inputs for layer in self.layers for each in layer.projections)

    @property
    def context_name(self) -> str:
        """What of the context length has changed keys. Nodes with other names compute other keys."""
        return "".join(rope.context_name for rope in self.ropes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. None: a token sees its whole sequence."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def longest_window(self) -> int | None:
        """Of all layers. None: no layer has one."""
        return max((window for window in self.windows if window is not None), default=None)

    def made_for(self, context_length: int) -> ModelConfig:
        """The same, with the rotary frequencies of a context of so many tokens, and without windows as long as it."""
        return replace(
            self,
            ropes=tuple(rope.made_for(context_length) for rope in self.ropes),
            layers=tuple(layer.made_for(context_length) for layer in self.layers),
        )


class _Identity(msgspec.Struct, kw_only=True):
    """The keys that decide whether this file can read the others."""

    architectures: list[str]
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    """Its name in files of the first versions of compressed-tensors."""
    text_config: dict[str, Any] | None = None


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
    family = _family(architecture, path)
    quantization = identity.quantization_config or identity.compression_config
    fields = _fields(family, path, identity.text_config or {})
    heads = _heads(fields, path)
    ropes = read_ropes(fields, heads, path, of_neighbours=family.rotates_neighbours)
    config = ModelConfig(
        architecture=architecture,
        model_type=fields.model_type,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        layers=_layers(family, fields, heads, path),
        rms_norm_eps=fields.rms_norm_eps,
        ropes=ropes,
        max_position_embeddings=ropes[0].num_positions(fields.max_position_embeddings),
        tie_word_embeddings=fields.tie_word_embeddings,
        dtype=_dtype(fields, path),
        eos_token_ids=_eos_token_ids(fields, folder),
        bos_token_id=fields.bos_token_id,
        quantization=None if quantization is None else read_quantization(quantization, path),
        embed_scale=fields.hidden_size**0.5 if family.scales_embeddings else 1.0,
        norms_add_one=family.norms_add_one,
        prefix=fields.prefix,
    )
    return config.made_for(config.max_position_embeddings)


def _fields(family: Family[F], path: Path, text_config: dict[str, Any]) -> F:
    if not family.has_text_config:
        return decode_file(path, family.fields)
    return convert(decode_file(path, dict[str, Any]) | text_config, family.fields, path, "text_config")


def _layers(family: Family[F], fields: F, heads: Heads, path: Path) -> tuple[Layer, ...]:
    try:
        return tuple(family.layer(fields, heads, i) for i in range(fields.num_hidden_layers))
    except ModelError as e:
        raise ModelError(f"{path}: {e}") from e


def _family(architecture: str, path: Path) -> Family[Any]:
    supported = families()
    if architecture in supported:
        return supported[architecture]
    reasons = [reason for name, reason in _OTHER_STATES.items() if architecture.startswith(name)]
    (nearest,) = get_close_matches(architecture, supported, n=1, cutoff=0)
    raise ModelError(
        f"{path}: architectures: {architecture} is not supported{''.join(reasons[:1])}; the nearest that is "
        f"supported is {nearest}, and all are {', '.join(supported)}"
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
