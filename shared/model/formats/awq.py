"""AWQ (version gemm): 4 bits, [K, N], eight outputs in a word in the order 0 2 4 6 1 3 5 7, groups with zeros.

Source: `awq/utils/packing_utils.py` of AutoAWQ 0.2.9.
"""

from __future__ import annotations

import torch

from shared.model.formats.common import Format, LinearSpec, columns, unpack
from shared.model.linear import QuantizedLinear, new_codes
from shared.model.weight_source import TensorReader, TensorSpec

_PLACE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word each of its outputs is."""


def _tensors(layer: LinearSpec) -> dict[str, TensorSpec]:
    return {
        f"{layer.name}.qweight": TensorSpec((layer.k, layer.words(layer.n)), ("I32",)),
        f"{layer.name}.qzeros": TensorSpec((layer.num_groups, layer.words(layer.n)), ("I32",)),
        f"{layer.name}.scales": TensorSpec((layer.num_groups, layer.n)),
    }


def _read(source: TensorReader, layer: LinearSpec, dtype: torch.dtype) -> QuantizedLinear:
    return layer.linear(
        _unpack(source.read(f"{layer.name}.qweight"), layer.n),
        source.read(f"{layer.name}.scales").T,
        _unpack(source.read(f"{layer.name}.qzeros"), layer.n),
        None,
    )


def _unpack(words_RW: torch.Tensor, n: int) -> torch.Tensor:
    """The codes [N, R] of rows of words."""
    codes_RN = unpack(words_RW, 4, 8 * words_RW.shape[1])
    places_N = torch.arange(n) // 8 * 8 + torch.tensor(_PLACE_OF_OUTPUT).repeat(-(-n // 8))[:n]
    return new_codes(n, len(codes_RN)).copy_(columns(codes_RN, places_N).T)


AWQ = Format(_tensors, _read)
