"""GLM-4-9B of 2024 (arXiv 2406.12793): GLM-4-0414 without the norms behind attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from shared.model.layer_records import Heads, Layer
from shared.model.models import glm4


def _layer(fields: glm4.Glm4Fields, heads: Heads, i: int) -> Layer:
    layer = glm4.FAMILY.layer(fields, heads, i)
    return replace(layer, attention_out_norm=None, mlp_out_norm=None)


FAMILY = replace(glm4.FAMILY, architecture="GlmForCausalLM", layer=_layer)
