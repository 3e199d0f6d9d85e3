"""Qwen3 with experts (arXiv 2505.09388): Qwen3's attention, and in most layers a mixture of experts for the MLP."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.model.config_fields import ExpertsFields, Positions, Width
from shared.model.family import Family, dense_mlp, experts_mlp, o_projection, qkv_projection
from shared.model.layer_records import Attention, Heads, Layer


class Qwen3MoeFields(ExpertsFields, kw_only=True):
    """Keys of config.json. Experts have `moe_intermediate_size`, and dense layers `intermediate_size`."""

    attention_bias: bool = False
    moe_intermediate_size: Width
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, msgspec.Meta(gt=0)] = 1
    """Every such layer has experts, the first of them at index `decoder_sparse_step` - 1."""
    mlp_only_layers: list[int] | None = None
    """Those that have none all the same."""
    use_sliding_window: bool = False
    sliding_window: Positions | None = 4096


def _layer(fields: Qwen3MoeFields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention, mlp, bias = f"{name}.self_attn", f"{name}.mlp", fields.attention_bias
    is_sparse = (i + 1) % fields.decoder_sparse_step == 0 and i not in (fields.mlp_only_layers or ())
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=bias),
            qk_norms=(f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"),
            o=o_projection(attention, fields, heads, has_bias=bias),
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=experts_mlp(mlp, fields, size=fields.moe_intermediate_size, is_normalized=fields.norm_topk_prob)
        if is_sparse
        else dense_mlp(mlp, fields),
    )


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    fields=Qwen3MoeFields,
    layer=_layer,
    sliding_window=lambda fields: fields.sliding_window if fields.use_sliding_window else None,
)
