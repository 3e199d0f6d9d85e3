"""compressed-tensors pack-quantized: 4 or 8 bits, packed along the inputs, a scale for each group or channel.

Codes are unsigned in the file: 2 ** (bits - 1) was added to them. Zeros are packed along the outputs. Source:
`compressors/pack_quantized/` of compressed-tensors 0.20.
"""

from __future__ import annotations

import torch

from shared.errors import ModelError
from shared.model.formats.common import Format, LinearSpec, unpack
from shared.model.linear import QuantizedLinear
from shared.model.weight_source import TensorReader, TensorSpec


def _tensors(layer: LinearSpec) -> dict[str, TensorSpec]:
    tensors = {
        f"{layer.name}.weight_packed": TensorSpec((layer.n, layer.words(layer.k)), ("I32",)),
        f"{layer.name}.weight_scale": TensorSpec((layer.n, layer.num_groups)),
        f"{layer.name}.weight_shape": TensorSpec((2,), ("I64", "I32")),
    }
    if not layer.scheme.is_symmetric:
        tensors[f"{layer.name}.weight_zero_point"] = TensorSpec(
            (layer.words(layer.n), layer.num_groups), ("I32",)
        )
    if layer.scheme.has_order:
        tensors[f"{layer.name}.weight_g_idx"] = TensorSpec((layer.k,), ("I32",))
    return tensors


def _read(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> QuantizedLinear:
    bits, name = layer.scheme.bits, layer.name
    _, k = source.read(f"{name}.weight_shape").tolist()
    if k != layer.k:  # the words of a row and the rows were checked
        raise ModelError(f"{name}.weight_shape: has {k} inputs; config.json makes it {layer.k}")
    zeros_NG = None
    if not layer.scheme.is_symmetric:
        zeros_NG = unpack(source.read(f"{name}.weight_zero_point").T, bits, layer.n).T.contiguous()
    return layer.linear(
        unpack(source.read(f"{name}.weight_packed"), bits, layer.k),
        source.read(f"{name}.weight_scale"),
        zeros_NG,
        source.read(f"{name}.weight_g_idx") if layer.scheme.has_order else None,
    )


PACK_QUANTIZED = Format(_tensors, _read)
