"""Mistral (arXiv 2310.06825): Llama without biases, with a window in every layer unless it is null."""

from __future__ import annotations

from shared.model.config_fields import ConfigFields, Positions
from shared.model.family import Family, dense_mlp, o_projection, qkv_projection
from shared.model.layer_records import Attention, Heads, Layer


class MistralFields(ConfigFields, kw_only=True):
    """Keys of config.json."""

    sliding_window: Positions | None = 4096


def _layer(fields: MistralFields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention = f"{name}.self_attn"
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=False),
            qk_norms=None,
            o=o_projection(attention, fields, heads),
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=dense_mlp(f"{name}.mlp", fields),
    )


FAMILY = Family(
    architecture="MistralForCausalLM",
    fields=MistralFields,
    layer=_layer,
    sliding_window=lambda fields: fields.sliding_window,
)
