"""Llama (arXiv 2302.13971, 2407.21783): any projection may have a bias."""

from __future__ import annotations

from shared.model.config_fields import ConfigFields
from shared.model.family import Family, dense_mlp, o_projection, qkv_projection
from shared.model.layer_records import Attention, Heads, Layer


class LlamaFields(ConfigFields, kw_only=True):
    """Keys of config.json."""

    attention_bias: bool = False
    mlp_bias: bool = False


def _layer(fields: LlamaFields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention, bias = f"{name}.self_attn", fields.attention_bias
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=bias),
            qk_norms=None,
            o=o_projection(attention, fields, heads, has_bias=bias),
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=dense_mlp(f"{name}.mlp", fields, has_bias=fields.mlp_bias),
    )


FAMILY = Family(architecture="LlamaForCausalLM", fields=LlamaFields, layer=_layer)
