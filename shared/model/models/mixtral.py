"""Mixtral (arXiv 2401.04088): Mistral with experts in every layer, whose weights always add up to 1."""

from __future__ import annotations

from shared.model.config_fields import ExpertsFields, Positions, Theta
from shared.model.family import Family, experts_mlp, o_projection, qkv_projection
from shared.model.layer_records import Attention, Heads, Layer


class MixtralFields(ExpertsFields, kw_only=True):
    """Keys of config.json."""

    rope_theta: Theta | None = 1e6
    sliding_window: Positions | None = None


def _layer(fields: MixtralFields, heads: Heads, i: int) -> Layer:
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
        mlp=experts_mlp(f"{name}.block_sparse_moe", fields, is_normalized=True, names=("w1", "w3", "w2")),
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    fields=MixtralFields,
    layer=_layer,
    sliding_window=lambda fields: fields.sliding_window,
)
