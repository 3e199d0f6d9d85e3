"""MXFP4: numbers of 4 bits (e2m1), and a power of two for each 32 inputs of an output (OCP Microscaling Formats 1.0).

A byte of the blocks has the number of an even input in its lower half and that of the next input in its upper half. A
scale is the exponent of a power of two plus 127; 255 stands for NaN. Twice a number is a whole number up to 12, so
products are of integers, as with other formats. Weights under 1e-37 count as 0.

Source: `integrations/mxfp4.py` of transformers 5.24.
"""

from __future__ import annotations

import torch

from shared.errors import ModelError
from shared.model.formats.common import Format, LinearSpec
from shared.model.linear import QuantizedLinear, new_codes
from shared.model.weight_source import TensorReader, TensorSpec

_NAN = 255


def _tensors(layer: LinearSpec) -> dict[str, TensorSpec]:
    groups = layer.num_groups
    return {
        f"{layer.name}_blocks": TensorSpec((layer.n, groups, layer.group_size // 2), ("U8",)),
        f"{layer.name}_scales": TensorSpec((layer.n, groups), ("U8",)),
    }


def _read(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> QuantizedLinear:
    blocks_NB = source.read(f"{layer.name}_blocks").flatten(1)
    exponents_NG = source.read(f"{layer.name}_scales")
    if bool((exponents_NG == _NAN).any()):
        raise ModelError(f"{layer.name}: a scale is not finite")
    codes_NK = new_codes(layer.n, layer.k)
    pairs_NB = codes_NK.view(torch.int16).copy_(blocks_NB)  # two codes at a time
    pairs_NB |= pairs_NB << 4
    pairs_NB &= 0x0F0F
    halved_NG = (exponents_NG.to(torch.int32) - 1).clamp(min=0)  # codes stand for twice their numbers
    return QuantizedLinear(
        codes_NK=codes_NK,
        bits=4,
        scales_NG=(halved_NG << 23).view(torch.float32),
        zeros_NG=None,
        is_weight_only=layer.scheme.is_weight_only,
        is_float=True,
    )


MXFP4 = Format(_tensors, _read)
