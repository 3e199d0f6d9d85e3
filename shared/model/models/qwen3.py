"""Qwen3, dense (arXiv 2505.09388): each head of q and k is normed, and the width of heads has a default."""

from __future__ import annotations

from shared.model.config_fields import HeadDim, SlidingFields
from shared.model.family import Family, dense_mlp, o_projection, qkv_projection, qwen_window
from shared.model.layer_records import Attention, Heads, Layer


class Qwen3Fields(SlidingFields, kw_only=True):
    """Keys of config.json."""

    head_dim: HeadDim = 128
    attention_bias: bool = False


def _layer(fields: Qwen3Fields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention, bias = f"{name}.self_attn", fields.attention_bias
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=bias),
            qk_norms=(f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"),
            o=o_projection(attention, fields, heads, has_bias=bias),
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=dense_mlp(f"{name}.mlp", fields),
    )


FAMILY = Family(architecture="Qwen3ForCausalLM", fields=Qwen3Fields, layer=_layer, sliding_window=qwen_window)
