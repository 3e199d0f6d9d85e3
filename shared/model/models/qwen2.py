"""Qwen2 and Qwen2.5 (arXiv 2407.10671): q, k and v have biases, and a window is off unless it is switched on."""

from __future__ import annotations

from shared.model.config_fields import SlidingFields
from shared.model.family import Family, dense_mlp, o_projection, qkv_projection, qwen_window
from shared.model.layer_records import Attention, Heads, Layer


def _layer(fields: SlidingFields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention = f"{name}.self_attn"
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=True),
            qk_norms=None,
            o=o_projection(attention, fields, heads),
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=dense_mlp(f"{name}.mlp", fields),
    )


FAMILY = Family(
    architecture="Qwen2ForCausalLM", fields=SlidingFields, layer=_layer, sliding_window=qwen_window
)
