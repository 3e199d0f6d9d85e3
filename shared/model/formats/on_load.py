"""Dense weights that are quantized while they are read (`--quantization`, and dummy weights of a quantized model)."""

from __future__ import annotations

import torch

from shared.model.formats.common import Format, LinearSpec
from shared.model.linear import QuantizedLinear, new_codes, quantize_weight
from shared.model.weight_source import TensorReader, TensorSpec


def _tensors(layer: LinearSpec) -> dict[str, TensorSpec]:
    return {f"{layer.name}.weight": TensorSpec((layer.n, layer.k))}


def _read(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> QuantizedLinear:
    """Piece by piece, so that no second copy of the weight is in memory."""
    codes_NK = new_codes(layer.n, layer.k)
    scales_NG = torch.empty(layer.n, layer.num_groups)
    for first_row, rows_RK in source.pieces(f"{layer.name}.weight"):
        part = quantize_weight(rows_RK, bits=layer.scheme.bits, group_size=layer.group_size)
        codes_NK[first_row : first_row + len(rows_RK)] = part.codes_NK
        scales_NG[first_row : first_row + len(rows_RK)] = part.scales_NG
    return layer.linear(codes_NK, scales_NG, None, None)


ON_LOAD = Format(_tensors, _read)
