"""compressed-tensors int-quantized: int8 weights [N, K] as they are, with a scale for each channel.

Source: `compressors/naive_quantized/base.py` of compressed-tensors 0.20.
"""

from __future__ import annotations

import torch

from shared.model.formats.common import Format, LinearSpec
from shared.model.linear import QuantizedLinear
from shared.model.weight_source import TensorReader, TensorSpec


def _tensors(layer: LinearSpec) -> dict[str, TensorSpec]:
    tensors = {
        f"{layer.name}.weight": TensorSpec((layer.n, layer.k), ("I8",)),
        f"{layer.name}.weight_scale": TensorSpec((layer.n, 1)),
    }
    if not layer.scheme.is_symmetric:
        tensors[f"{layer.name}.weight_zero_point"] = TensorSpec((layer.n, 1), ("I8",))
    return tensors


def _read(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> QuantizedLinear:
    codes_NK = _unsigned(source.read(f"{layer.name}.weight"))
    zeros_NG = None
    if not layer.scheme.is_symmetric:
        zeros_NG = _unsigned(source.read(f"{layer.name}.weight_zero_point"))
    return layer.linear(codes_NK, source.read(f"{layer.name}.weight_scale"), zeros_NG, None)


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """int8 plus 128: the upper bit is turned."""
    return values.view(torch.uint8).bitwise_xor_(torch.tensor(0x80, dtype=torch.uint8))


INT_QUANTIZED = Format(_tensors, _read)
