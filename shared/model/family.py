"""What a file of `shared/model/models` consists of, and the parts of layers that most families share.

The router imports this file, so this file never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.errors import ModelError
from shared.model.config_fields import ConfigFields, ExpertsFields, LayerTypes, SlidingFields
from shared.model.layer_records import DenseMlp, ExpertsMlp, Heads, Layer, Projection

F = TypeVar("F", bound=ConfigFields)


@dataclass(frozen=True, kw_only=True)
class Family(Generic[F]):
    """One architecture, as `architectures` of config.json names it."""

    architecture: str
    fields: type[F]
    """The keys of config.json that are read. All others are ignored, so they must not change what is computed."""
    has_text_config: bool = False
    """Whether `text_config` has the keys of what is served. What it leaves out is read beside it."""
    layer: Callable[[F, Heads, int], Layer]
    """Layer i."""
    rotates_neighbours: bool = False
    """Whether element 2i of a head is rotated with 2i + 1."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by hidden_size ** 0.5."""
    norms_add_one: bool = False
    """Whether norms multiply by 1 + their weight, in float32."""


def qkv_projection(attention: str, fields: ConfigFields, heads: Heads, *, has_bias: bool) -> Projection:
    """q_proj, k_proj and v_proj of a layer's `attention`."""
    sizes = {"q_proj": heads.q_size, "k_proj": heads.kv_size, "v_proj": heads.kv_size}
    outputs = {f"{attention}.{name}": size for name, size in sizes.items()}
    return Projection(outputs, fields.hidden_size, has_bias)


def o_projection(attention: str, fields: ConfigFields, heads: Heads, *, has_bias: bool = False) -> Projection:
    """o_proj of a layer's `attention`."""
    return Projection({f"{attention}.o_proj": fields.hidden_size}, heads.q_size, has_bias)


MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def dense_mlp(
    mlp: str,
    fields: ConfigFields,
    *,
    has_bias: bool = False,
    is_gelu: bool = False,
    size: int | None = None,
    names: tuple[str, str, str] = MLP_NAMES,
) -> DenseMlp:
    """The gate, up and down projections of `mlp`; between them are `size` elements, or `intermediate_size`."""
    size, (gate, up, down) = size or fields.intermediate_size, names
    return DenseMlp(
        gate_up=Projection({f"{mlp}.{gate}": size, f"{mlp}.{up}": size}, fields.hidden_size, has_bias),
        down=Projection({f"{mlp}.{down}": fields.hidden_size}, size, has_bias),
        is_gelu=is_gelu,
    )


def experts_mlp(
    mlp: str,
    fields: ExpertsFields,
    *,
    is_normalized: bool,
    size: int | None = None,
    names: tuple[str, str, str] = MLP_NAMES,
) -> ExpertsMlp:
    """The router `gate` and the `experts` of `mlp`, each with `size` elements between its projections."""
    return ExpertsMlp(
        router=Projection({f"{mlp}.gate": fields.count}, fields.hidden_size, keeps_type=True),
        experts=tuple(
            dense_mlp(f"{mlp}.experts.{e}", fields, size=size, names=names) for e in range(fields.count)
        ),
        top_k=fields.num_experts_per_tok,
        is_normalized=is_normalized,
    )


def fused_mlp(mlp: str, fields: ConfigFields) -> DenseMlp:
    """gate_up_proj and down_proj of a layer's `mlp`."""
    gate_up = {f"{mlp}.gate_up_proj": 2 * fields.intermediate_size}
    return DenseMlp(
        gate_up=Projection(gate_up, fields.hidden_size),
        down=Projection({f"{mlp}.down_proj": fields.hidden_size}, fields.intermediate_size),
    )


def qwen_window(fields: SlidingFields, i: int) -> int | None:
    """The window of layer i, as Qwen's configs say it. Raises ModelError for `layer_types` of another length."""
    is_sliding = is_sliding_layer(fields, fields.layer_types, i, otherwise=i >= fields.max_window_layers)
    return fields.sliding_window if fields.use_sliding_window and is_sliding else None


def is_sliding_layer(fields: ConfigFields, types: LayerTypes, i: int, *, otherwise: bool) -> bool:
    """Whether layer i has a window, by `layer_types`. `otherwise` is the answer where the file has none.

    Raises ModelError for another number of types than of layers.
    """
    if types is None:
        return otherwise
    if len(types) != fields.num_hidden_layers:
        raise ModelError(
            f"layer_types: has {len(types)} layers, and num_hidden_layers is {fields.num_hidden_layers}"
        )
    return types[i] == "sliding_attention"
