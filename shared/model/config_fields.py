"""The keys of config.json that all families have, and those that several have. transformers 4 or 5 wrote them.

The defaults are those of transformers. A wrong value here would not show in the shape of any tensor. The router
imports this file, so this file never imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from shared.errors import ModelError

Factor = Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
Theta = Annotated[float, msgspec.Meta(gt=1, le=1e12)]
Positions = Annotated[int, msgspec.Meta(gt=0, le=2**27)]
Width = Annotated[int, msgspec.Meta(gt=0, le=2**22)]
Vocabulary = Annotated[int, msgspec.Meta(gt=0, le=2**24)]
NumHeads = Annotated[int, msgspec.Meta(gt=0, le=2**12)]
Epsilon = Annotated[float, msgspec.Meta(ge=0, lt=1)]
HeadDim = Annotated[int, msgspec.Meta(gt=0, le=2**12, multiple_of=2)]
NumExperts = Annotated[int, msgspec.Meta(gt=0, le=2**12)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
TokenIds = TokenId | list[TokenId] | None
LayerTypes = list[Literal["full_attention", "sliding_attention"]] | None
MOST_EXPERTS = 2**16
"""Of all layers. Each is a record, and published models have up to 25,000."""

T = TypeVar("T")


class ConfigFields(msgspec.Struct, kw_only=True):
    """The keys of every family. `head_dim` is None where it follows from other widths."""

    prefix: ClassVar[str] = ""
    """What the names of tensors begin with. That of an lm_head that is not tied does not."""
    model_type: str
    vocab_size: Vocabulary
    hidden_size: Width
    num_hidden_layers: Annotated[int, msgspec.Meta(gt=0, le=2**10)]
    num_attention_heads: NumHeads
    num_key_value_heads: NumHeads | None = None
    head_dim: HeadDim | None = None
    intermediate_size: Width
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Epsilon
    max_position_embeddings: Positions
    tie_word_embeddings: bool = False
    original_max_position_embeddings: Positions | None = None
    rope_theta: Theta | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenIds = None

    @property
    def ropes(self) -> dict[str, dict[str, Any]]:
        """What the file says of each rotary embedding of the model, by the key that has it."""
        # transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters. With both, rope_scaling wins.
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        return {key: self.rope_scaling or self.rope_parameters or {}}


class SlidingFields(ConfigFields, kw_only=True):
    """The keys of Qwen's windows."""

    use_sliding_window: bool = False
    sliding_window: Positions | None = 4096
    max_window_layers: int = 28
    layer_types: LayerTypes = None


class ExpertsFields(ConfigFields, kw_only=True):
    """The keys of a mixture of experts. transformers 5 calls `num_experts` of some families `num_local_experts`."""

    num_experts: NumExperts | None = None
    num_local_experts: NumExperts | None = None
    num_experts_per_tok: NumExperts

    def __post_init__(self) -> None:
        """Raise ValueError, which msgspec makes its own error of, unless a token finds its experts."""
        if self.num_experts is None and self.num_local_experts is None:
            raise ValueError("num_experts: is missing, and so is num_local_experts")
        if self.num_experts_per_tok > self.count:
            raise ValueError(f"num_experts_per_tok: {self.num_experts_per_tok} of {self.count} experts")
        if (layers := self.num_hidden_layers) * self.count > MOST_EXPERTS:
            raise ValueError(
                f"num_experts: {self.count} in each of {layers} layers, more than {MOST_EXPERTS} in all"
            )

    @property
    def count(self) -> int:
        """How many experts a layer has."""
        return self.num_experts or self.num_local_experts or 0


def decode_file(path: Path, fields: type[T]) -> T:
    """Read a JSON file. Raises ModelError, which names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=fields)
    except OSError as e:
        raise ModelError(f"{path}: cannot be read ({e.strerror}); a model folder needs this file") from e
    except (msgspec.DecodeError, RecursionError) as e:
        raise ModelError(f"{path}: {e}") from e


def convert(raw: dict[str, Any], fields: type[T], path: Path, key: str) -> T:
    """Read a key's object. Raises ModelError, which names the file, the key and the field."""
    try:
        return msgspec.convert(raw, type=fields)
    except msgspec.ValidationError as e:
        raise ModelError(f"{path}: {key}: {e}") from e
