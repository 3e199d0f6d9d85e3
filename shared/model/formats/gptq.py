"""GPTQ: 4 or 8 bits, [K, N], packed along the inputs; zeros packed along the outputs, one less in version 1 files.

Source: `nn_modules/qlinear/torch.py` and `utils/model.py` of GPTQModel.
"""

from __future__ import annotations

import torch

from shared.model.formats.common import Format, LinearSpec, unpack
from shared.model.linear import QuantizedLinear
from shared.model.quantization import Layout
from shared.model.weight_source import TensorReader, TensorSpec


def _tensors(layer: LinearSpec) -> dict[str, TensorSpec]:
    return {
        f"{layer.name}.qweight": TensorSpec((layer.words(layer.k), layer.n), ("I32",)),
        f"{layer.name}.qzeros": TensorSpec((layer.num_groups, layer.words(layer.n)), ("I32",)),
        f"{layer.name}.scales": TensorSpec((layer.num_groups, layer.n)),
        f"{layer.name}.g_idx": TensorSpec((layer.k,), ("I32",)),
    }


def _read(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> QuantizedLinear:
    bits, name = layer.scheme.bits, layer.name
    zeros_GN = unpack(source.read(f"{name}.qzeros"), bits, layer.n)
    if layer.scheme.layout is Layout.GPTQ:
        zeros_GN = (zeros_GN + 1).bitwise_and_((1 << bits) - 1)
    return layer.linear(
        unpack(source.read(f"{name}.qweight").T, bits, layer.k),
        source.read(f"{name}.scales").T,
        zeros_GN.T.contiguous(),
        source.read(f"{name}.g_idx"),
    )


GPTQ = Format(_tensors, _read)
