"""GLM-4-0414, dense: norms before and behind attention and MLP, half of each head rotated, element 2i with 2i + 1."""

from __future__ import annotations

from shared.model.config_fields import ConfigFields, HeadDim
from shared.model.family import Family, fused_mlp, o_projection, qkv_projection
from shared.model.layer_records import Attention, Heads, Layer


class Glm4Fields(ConfigFields, kw_only=True):
    """Keys of config.json."""

    head_dim: HeadDim = 128
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True


def _layer(fields: Glm4Fields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention = f"{name}.self_attn"
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=fields.attention_bias),
            qk_norms=None,
            o=o_projection(attention, fields, heads),
        ),
        attention_out_norm=f"{name}.post_self_attn_layernorm.weight",
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=fused_mlp(f"{name}.mlp", fields),
        mlp_out_norm=f"{name}.post_mlp_layernorm.weight",
    )


FAMILY = Family(architecture="Glm4ForCausalLM", fields=Glm4Fields, layer=_layer, rotates_neighbours=True)
