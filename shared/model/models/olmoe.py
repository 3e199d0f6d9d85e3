"""OLMoE (arXiv 2409.02060): experts in every layer; q of all heads is normed as one row, and so is k."""

from __future__ import annotations

from shared.model.config_fields import ExpertsFields
from shared.model.family import Family, experts_mlp, o_projection, qkv_projection
from shared.model.layer_records import Attention, Heads, Layer


class OlmoeFields(ExpertsFields, kw_only=True):
    """Keys of config.json."""

    attention_bias: bool = False
    norm_topk_prob: bool = False
    clip_qkv: None = None
    """A bound on q, k and v, which no published model has and which is not supported."""


def _layer(fields: OlmoeFields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention, bias = f"{name}.self_attn", fields.attention_bias
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=bias),
            qk_norms=(f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"),
            norms_whole_qk=True,
            o=o_projection(attention, fields, heads, has_bias=bias),
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=experts_mlp(f"{name}.mlp", fields, is_normalized=fields.norm_topk_prob),
    )


FAMILY = Family(architecture="OlmoeForCausalLM", fields=OlmoeFields, layer=_layer)
