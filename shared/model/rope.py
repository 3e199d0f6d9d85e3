"""Rotary position embedding as config.json describes it: `read_ropes`.

The router imports this file, so this file never imports torch. `shared/model/rotary.py` computes the frequencies.

Two types have frequencies that depend on the longest sequence (`dynamic` and `longrope`). transformers chooses them
anew whenever a running sequence grows longer, and then the keys that it has cached are no longer those that it would
compute. Here they are fixed when a model is loaded, by its context length (`Rope.made_for`), as in vLLM, so that a
key depends on its token and position alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shared.errors import ModelError
from shared.model.config_fields import ConfigFields, Factor, Positions, Theta, convert
from shared.model.layer_records import Heads

_DEFAULT_THETA = 10_000.0
_MOST_POSITIONS = 2**27


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor` (arXiv 2306.15595)."""

    factor: Factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp in between."""

    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Positions


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): low frequencies are divided by `factor`, high ones kept, with a ramp in between.

    The ramp goes from the pair that turns `beta_fast` times within the original context to the one that turns
    `beta_slow` times. Both are whole numbers if `truncate`.
    """

    factor: Factor
    original_max_position_embeddings: Positions
    attention_factor: Factor | None = None
    mscale: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    mscale_all_dim: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """What multiplies cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(m: float) -> float:
            return 0.1 * m * math.log(max(self.factor, 1.0)) + 1.0

        return (
            scale(self.mscale) / scale(self.mscale_all_dim)
            if self.mscale and self.mscale_all_dim
            else scale(1)
        )


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK-aware scaling: a larger theta, by how much longer `length` is than the original context."""

    factor: Factor
    original_max_position_embeddings: Positions
    length: int


@dataclass(frozen=True, kw_only=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753): a factor for each pair divides its frequency.

    A model has `long_factor` if its context is longer than the original one (`is_long`), else `short_factor`.
    """

    short_factor: tuple[Factor, ...]
    long_factor: tuple[Factor, ...]
    original_max_position_embeddings: Annotated[int, msgspec.Meta(gt=1, le=_MOST_POSITIONS)]
    factor: Factor
    attention_factor: Factor | None = None
    is_long: bool = True

    @property
    def amplitude(self) -> float:
        """What multiplies cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(
            1 + math.log(max(self.factor, 1.0)) / math.log(self.original_max_position_embeddings)
        )


Scaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongScaling


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotation of each head of q and k by angles that grow with the position (arXiv 2104.09864).

    The first `rotary_dim` elements of a head are rotated: element i with i + rotary_dim / 2, or 2i with 2i + 1 if
    it is `of_neighbours`.
    """

    theta: float
    rotary_dim: int
    of_neighbours: bool = False
    scaling: Scaling | None = None

    def head_order(self, head_dim: int) -> list[int]:
        """The elements of a head in the order in which forwards have them: element i pairs with i + head_dim / 2.

        The pairs that are not rotated come last, with the angle 0. The heads of q and of k are put in this order
        when weights are loaded. The product of q and k is a sum, so their scores stay what they are.
        """
        rotated, rest = range(self.rotary_dim), range(self.rotary_dim, head_dim)
        half, half_rest = len(rotated) // 2, len(rest) // 2
        first, second = rotated[:half], rotated[half:]
        if self.of_neighbours:
            first, second = rotated[::2], rotated[1::2]
        return [*first, *rest[:half_rest], *second, *rest[half_rest:]]

    def made_for(self, length: int) -> Rope:
        """The same, with the frequencies of a context of `length` tokens where they depend on it."""
        scaling = self.scaling
        if isinstance(scaling, DynamicScaling):
            return replace(self, scaling=replace(scaling, length=length))
        if isinstance(scaling, LongScaling):
            is_long = length > scaling.original_max_position_embeddings
            return replace(self, scaling=replace(scaling, is_long=is_long))
        return self

    @property
    def context_name(self) -> str:
        """What of the context length has changed keys. Nodes with other names compute other keys."""
        match self.scaling:
            case DynamicScaling(length=length):
                return f"/rope-of-{length}"
            case LongScaling(is_long=is_long):
                return f"/rope-{'long' if is_long else 'short'}"
        return ""

    def num_positions(self, max_position_embeddings: int) -> int:
        """How long a context the model was made for. Of yarn and dynamic, what config.json says is extended."""
        match self.scaling:
            case YarnScaling(factor=factor, original_max_position_embeddings=original):
                return max(max_position_embeddings, int(factor * original))
            case DynamicScaling(factor=factor, original_max_position_embeddings=original):
                return int(max(factor, 1.0) * original)
        return max_position_embeddings


class _RopeFields(msgspec.Struct, kw_only=True):
    """The fields of every rope type. The other fields of a type are in its dataclass above."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: float | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Positions | None = None


def read_ropes(fields: ConfigFields, heads: Heads, path: Path, *, of_neighbours: bool) -> tuple[Rope, ...]:
    """Read the rotary embeddings of config.json, which is at `path`. Raises ModelError."""
    return tuple(
        _read_rope(key, raw, fields, heads, path, of_neighbours) for key, raw in fields.ropes.items()
    )


def _read_rope(
    key: str, raw: dict[str, Any], fields: ConfigFields, heads: Heads, path: Path, of_neighbours: bool
) -> Rope:
    if "full_attention" in raw or "sliding_attention" in raw:
        raise ModelError(f"{path}: {key}: rotary parameters per layer type are not supported")
    rope = convert(raw, _RopeFields, path, key)
    parts = (rope.partial_rotary_factor, fields.partial_rotary_factor, 1.0)
    part = next(each for each in parts if each is not None)
    rotary_dim = int(heads.head_dim * part) if 0 < part <= 1 else 0
    if rotary_dim % 2 or rotary_dim == 0:
        raise ModelError(
            f"{path}: partial_rotary_factor: {part} of {heads.head_dim} elements is no even number up to that"
        )
    most = fields.max_position_embeddings
    length = fields.original_max_position_embeddings or rope.original_max_position_embeddings or most
    original = {"original_max_position_embeddings": length}
    match rope.rope_type or rope.type or "default":
        case "default":
            scaling: Scaling | None = None
        case "linear":
            scaling = convert(raw, LinearScaling, path, key)
        case "llama3":
            scaling = convert(raw | original, Llama3Scaling, path, key)
            if scaling.low_freq_factor >= scaling.high_freq_factor:
                raise ModelError(f"{path}: {key}: low_freq_factor must be below high_freq_factor")
        case "yarn" if "long_factor" not in raw:  # Phi-3 has called LongRoPE so
            scaling = convert(raw | original, YarnScaling, path, key)
        case "dynamic":
            if rotary_dim == 2:
                raise ModelError(f"{path}: {key}: rope type dynamic needs more than 2 rotated elements")
            lengths = {"original_max_position_embeddings": most, "length": most}
            scaling = convert(raw | lengths, DynamicScaling, path, key)
        case "longrope" | "su" | "yarn":
            factor = {"factor": rope.factor or most / length}
            scaling = convert(raw | original | factor, LongScaling, path, key)
            for name in ("short_factor", "long_factor"):
                if len(getattr(scaling, name)) != rotary_dim // 2:
                    raise ModelError(f"{path}: {key}: {name} must have {rotary_dim // 2} factors")
        case other:
            supported = "default, linear, llama3, yarn, dynamic, longrope"
            raise ModelError(f"{path}: {key}: rope type {other} is not supported; supported are {supported}")
    theta = rope.rope_theta or fields.rope_theta or _DEFAULT_THETA
    read = Rope(theta=theta, rotary_dim=rotary_dim, of_neighbours=of_neighbours, scaling=scaling)
    if read.num_positions(most) > _MOST_POSITIONS:
        raise ModelError(f"{path}: {key}: factor: extends the context to more than {_MOST_POSITIONS} tokens")
    return read
