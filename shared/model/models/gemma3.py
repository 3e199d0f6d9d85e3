"""Gemma 3 (arXiv 2503.19786), the text model: windows in five of six layers, with a rotary embedding of their own.

Norms before and behind attention and MLP multiply by 1 + their weight, embeddings are scaled, and MLPs have GELU.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from shared.model.config_fields import (
    ConfigFields,
    Epsilon,
    Factor,
    HeadDim,
    LayerTypes,
    NumHeads,
    Positions,
    Theta,
    Vocabulary,
)
from shared.model.family import Family, dense_mlp, is_sliding_layer, o_projection, qkv_projection
from shared.model.layer_records import Attention, Heads, Layer

_LayerType = Literal["full_attention", "sliding_attention"]


class Gemma3Fields(ConfigFields, kw_only=True):
    """Keys of config.json. Files of models with images leave out those that have a default."""

    vocab_size: Vocabulary = 262_208
    num_attention_heads: NumHeads = 8
    num_key_value_heads: NumHeads = 4
    rms_norm_eps: Epsilon = 1e-6
    max_position_embeddings: Positions = 131_072
    head_dim: HeadDim = 256
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Factor = 256
    """Scores are multiplied by this ** -0.5."""
    sliding_window: Positions = 4096
    sliding_window_pattern: Annotated[int, msgspec.Meta(gt=0)] = 6
    """Every such layer sees its whole sequence, unless there are `layer_types`."""
    layer_types: LayerTypes = None
    rope_theta: Theta = 1_000_000.0
    rope_local_base_freq: Theta = 10_000.0
    """The theta of layers with a window. transformers 5 writes `rope_parameters` of each type of layer."""
    rope_parameters: dict[_LayerType, dict[str, Any] | None] | None = None  # type: ignore[assignment]
    attn_logit_softcapping: None = None
    final_logit_softcapping: None = None
    """Bounds of scores and logits, which no published model has and which are not supported."""
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        """Raise ValueError, which msgspec makes its own error of, for what is not supported."""
        if self.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention: is true, and only causal attention is supported")

    @property
    def ropes(self) -> dict[str, dict[str, Any]]:
        """That of layers without a window, then of those with one."""
        by_type = self.rope_parameters or {}
        full, sliding = by_type.get("full_attention") or {}, by_type.get("sliding_attention") or {}
        scaling, theta = self.rope_scaling or {}, self.rope_theta
        key = "rope_scaling" if scaling else "rope_parameters.full_attention"
        return {
            key: {"rope_theta": theta} | full | scaling,
            "rope_parameters.sliding_attention": {"rope_theta": self.rope_local_base_freq} | sliding,
        }


def _layer(fields: Gemma3Fields, heads: Heads, i: int) -> Layer:
    name = f"{fields.prefix}model.layers.{i}"
    attention, bias = f"{name}.self_attn", fields.attention_bias
    is_full = (i + 1) % fields.sliding_window_pattern == 0
    is_sliding = is_sliding_layer(fields, fields.layer_types, i, otherwise=not is_full)
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=bias),
            qk_norms=(f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"),
            q_scale=(heads.head_dim / fields.query_pre_attn_scalar) ** 0.5,
            o=o_projection(attention, fields, heads, has_bias=bias),
            window=fields.sliding_window if is_sliding else None,
            rope=1 if is_sliding else 0,
        ),
        attention_out_norm=f"{name}.post_attention_layernorm.weight",
        mlp_norm=f"{name}.pre_feedforward_layernorm.weight",
        mlp=dense_mlp(f"{name}.mlp", fields, is_gelu=True),
        mlp_out_norm=f"{name}.post_feedforward_layernorm.weight",
    )


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    fields=Gemma3Fields,
    layer=_layer,
    scales_embeddings=True,
    norms_add_one=True,
)
