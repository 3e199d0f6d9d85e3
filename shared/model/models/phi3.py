"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2503.01743).

One tensor has q, k and v, and another gate and up. A part of each head may be rotated, by LongRoPE.
"""

from __future__ import annotations

from shared.model.config_fields import ConfigFields, Positions
from shared.model.family import Family, fused_mlp, o_projection
from shared.model.layer_records import Attention, Heads, Layer, Projection


class Phi3Fields(ConfigFields, kw_only=True):
    """Keys of config.json."""

    original_max_position_embeddings: Positions = 4096
    sliding_window: Positions | None = None


def _layer(fields: Phi3Fields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention = f"{name}.self_attn"
    qkv = {f"{attention}.qkv_proj": heads.q_size + 2 * heads.kv_size}
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=Projection(qkv, fields.hidden_size), qk_norms=None, o=o_projection(attention, fields, heads)
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=fused_mlp(f"{name}.mlp", fields),
    )


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    fields=Phi3Fields,
    layer=_layer,
    sliding_window=lambda fields: fields.sliding_window,
)
