"""FP8 (e4m3) weights [N, K] with a scale for the tensor, for each channel or for each block of 128 x 128.

They are decoded into the type of the activations. A CPU has no products of FP8, and codes of 8 bits would lose the
small values of a block. What bf16 rounds off is a thirtieth of what FP8 has rounded. GPUs that have the type keep it,
where blocks divide the inputs: activations become FP8 with a scale for each token and block, or, where the file has
weights alone, weights are decoded in registers.

Sources: compressed-tensors 0.20 (float-quantized), and the finegrained FP8 of transformers, whose scales are named
weight_scale_inv though they are multiplied as well.
"""

from __future__ import annotations

import torch

from shared.host_memory import new_mapping
from shared.model.formats.common import Format, LinearSpec, finite
from shared.model.linear import DenseLinear, Linear, QuantizedLinear
from shared.model.quantization import Layout
from shared.model.weight_source import TensorReader, TensorSpec


def _scale_name(layer: LinearSpec) -> str:
    return (
        f"{layer.name}.{'weight_scale_inv' if layer.scheme.layout is Layout.FP8_BLOCKS else 'weight_scale'}"
    )


def _scale_shape(layer: LinearSpec) -> tuple[int, ...]:
    if layer.scheme.block is None:
        return (1,)
    rows, columns = layer.scheme.block
    return -(-layer.n // rows), -(-layer.k // (columns or layer.k))


def _tensors(layer: LinearSpec) -> dict[str, TensorSpec]:
    return {
        f"{layer.name}.weight": TensorSpec((layer.n, layer.k), ("F8_E4M3",)),
        _scale_name(layer): TensorSpec(_scale_shape(layer)),
    }


def _read(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> Linear:
    _, columns = layer.scheme.block or (layer.n, None)
    if layer.scheme.keeps_float and layer.k % (columns or layer.k) == 0:
        return _kept(source, layer)
    return _decoded(source, layer, dtype)


def _kept(source: TensorReader, layer: LinearSpec) -> QuantizedLinear:
    scale = finite(layer.name, source.read(_scale_name(layer)).float())
    rows, _ = layer.scheme.block or (layer.n, None)
    return QuantizedLinear(
        codes_NK=source.read(f"{layer.name}.weight").view(torch.uint8),
        bits=8,
        scales_NG=scale.view(len(scale), -1).repeat_interleave(rows, 0)[: layer.n],
        zeros_NG=None,
        is_weight_only=layer.scheme.is_weight_only,
        is_float=True,
    )


def _decoded(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> DenseLinear:
    """Piece by piece: float32 values of a whole layer would take four times its bytes."""
    scale = finite(layer.name, source.read(_scale_name(layer)).float())
    weight_NK = new_mapping(layer.n * layer.k * dtype.itemsize).view(dtype).view(layer.n, layer.k)
    for first_row, rows_RK in source.pieces(f"{layer.name}.weight"):
        last_row, factors = first_row + len(rows_RK), scale
        if layer.scheme.block is not None:
            rows, columns = layer.scheme.block
            factors = scale[torch.arange(first_row, last_row) // rows]
            if columns is not None:
                factors = factors.repeat_interleave(columns, 1)[:, : layer.k]
        weight_NK[first_row:last_row] = rows_RK.float().mul_(factors)
    return DenseLinear(weight_NK=weight_NK, bias_N=None)


FP8 = Format(_tensors, _read)
