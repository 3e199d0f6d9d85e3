"""gpt-oss (arXiv 2508.10925): experts in every layer, sinks, and a window in every second layer.

One tensor has all experts of a layer, in bf16 or MXFP4, with gate and up in turn. The softmax of the router is over
the chosen experts alone. transformers' `models/gpt_oss` is the reference.
"""

from __future__ import annotations

from shared.model.config_fields import ExpertsFields, Factor, HeadDim, LayerTypes, Positions, Theta
from shared.model.family import Family, is_sliding_layer, o_projection, qkv_projection
from shared.model.layer_records import (
    Attention,
    DenseMlp,
    ExpertsMlp,
    Heads,
    Layer,
    Projection,
    Stacked,
    SwigluClamp,
)


class GptOssFields(ExpertsFields, kw_only=True):
    """Keys of config.json. Without `layer_types` the first layer has a window, the second has none, and so on.

    Published files name no type of weights, which are bfloat16.
    """

    head_dim: HeadDim | None = 64
    attention_bias: bool = True
    sliding_window: Positions | None = 128
    layer_types: LayerTypes = None
    rope_theta: Theta | None = 150_000.0
    swiglu_limit: Factor = 7.0
    swiglu_alpha: Factor = 1.702
    torch_dtype: str | None = "bfloat16"

    def __post_init__(self) -> None:
        """Raise ValueError where rope is left to the defaults of transformers, as in no published file."""
        super().__post_init__()
        if self.rope_scaling is None and self.rope_parameters is None:
            raise ValueError("rope_scaling: is missing, and so is rope_parameters")


def _expert(mlp: str, fields: GptOssFields, e: int) -> DenseMlp:
    gate_up = {f"{mlp}.experts.gate_up_proj": 2 * fields.intermediate_size}
    down = {f"{mlp}.experts.down_proj": fields.hidden_size}
    sizes = fields.hidden_size, fields.intermediate_size
    return DenseMlp(
        gate_up=Projection(
            gate_up, sizes[0], has_bias=True, stacked=Stacked(e, fields.count, alternates=True)
        ),
        down=Projection(down, sizes[1], has_bias=True, stacked=Stacked(e, fields.count)),
    )


def _layer(fields: GptOssFields, heads: Heads, i: int) -> Layer:
    name = f"model.layers.{i}"
    attention, mlp, bias = f"{name}.self_attn", f"{name}.mlp", fields.attention_bias
    is_sliding = is_sliding_layer(fields, fields.layer_types, i, otherwise=i % 2 == 0)
    return Layer(
        attention_norm=f"{name}.input_layernorm.weight",
        attention=Attention(
            qkv=qkv_projection(attention, fields, heads, has_bias=bias),
            qk_norms=None,
            o=o_projection(attention, fields, heads, has_bias=bias),
            window=fields.sliding_window if is_sliding else None,
            sinks=f"{attention}.sinks",
        ),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=ExpertsMlp(
            router=Projection(
                {f"{mlp}.router": fields.count}, fields.hidden_size, has_bias=True, keeps_type=True
            ),
            experts=tuple(_expert(mlp, fields, e) for e in range(fields.count)),
            top_k=fields.num_experts_per_tok,
            is_normalized=True,
            clamp=SwigluClamp(limit=fields.swiglu_limit, alpha=fields.swiglu_alpha),
        ),
    )


FAMILY = Family(architecture="GptOssForCausalLM", fields=GptOssFields, layer=_layer)
