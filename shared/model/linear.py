"""The linear layers of a decoder: a weight, its bias, and how rows are multiplied by it.

A format of checkpoints is a reader that yields these (`shared.model.formats`); the decoder and the backends know no
format. `multiply` is plain torch on any device: what the torch backend computes, and the slow twin of faster kernels.

Shape suffixes: T rows of x, N outputs, K inputs, G groups of K that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn.functional import linear

from shared.errors import ModelError
from shared.host_memory import new_mapping
from shared.kernels.row_codes import LEAST, quantize_rows

_PIECE_ELEMENTS = 1 << 18
_FP4_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int16)
"""Twice the numbers of FP4 (e2m1), by their codes."""
_EXACT_K = 512
"""float32 adds up this many products of a code by a code exactly: 512 * 127 * 255 < 2 ** 24."""


@dataclass(frozen=True, kw_only=True)
class DenseLinear:
    """A weight in the type of the activations."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.weight_NK.shape[0], self.weight_NK.shape[1]

    def multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias, [T, N]."""
        return linear(x_TK, self.weight_NK, self.bias_N)

    def with_outputs(self, order_N: torch.Tensor) -> DenseLinear:
        """The layer whose output i is output order_N[i] of this one."""
        bias_N = None if self.bias_N is None else self.bias_N[order_N]
        return DenseLinear(weight_NK=self.weight_NK[order_N], bias_N=bias_N)

    def to(self, device: torch.device) -> DenseLinear:
        """The same layer on `device`."""
        return replace(self, weight_NK=self.weight_NK.to(device))


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """A weight of codes: W[n, k] is (code[n, k] - zero[n, g]) * scale[n, g], where g is the group of k.

    Unless the layer `is_weight_only`, rows of x become codes of 8 bits with a scale for each group as well. Products
    of codes, but those of FP8, are added up as integers, exactly in any order, and groups in ascending order. Without
    `zeros_NG`, all are 2 ** (bits - 1).
    """

    codes_NK: torch.Tensor
    """uint8, one code in each, or two (`is_packed`)."""
    bits: int
    """8 or 4."""
    scales_NG: torch.Tensor
    """float32."""
    zeros_NG: torch.Tensor | None
    """uint8."""
    is_packed: bool = False
    """Whether a byte holds two codes of 4 bits, that of the even input in its lower half: [N, K / 2]. On GPUs."""
    order_K: torch.Tensor | None = None
    """int64: column k of the codes is input order_K[k]. None: the inputs as they come."""
    bias_N: torch.Tensor | None = None
    is_weight_only: bool = False
    """Whether x stays in 16 bits."""
    is_float: bool = False
    """Whether codes are numbers, which have no zeros: of FP8 (e4m3), on GPUs, or of FP4 (e2m1).

    Codes of x are FP8 as well where those of the weight are. Scales of FP4 are powers of two, and those of twice the
    numbers, which are integers.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes_NK.shape[0], self.codes_NK.shape[1] << self.is_packed

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales_NG.shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether all zeros are the middle of the codes."""
        return self.zeros_NG is None

    def multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias, [T, N], in the type of x."""
        if self.is_weight_only:
            y_TN = x_TK.float() @ self.dequantized().T
            return (y_TN if self.bias_N is None else y_TN + self.bias_N).to(x_TK.dtype)
        size, dtype = self.group_size, torch.float8_e4m3fn if self.is_float and self.bits == 8 else torch.int8
        codes_TGK, scales_TG = quantize_rows(
            in_groups(x_TK if self.order_K is None else x_TK[:, self.order_K], size), dtype
        )
        y_TN, each_NK = (
            torch.zeros(len(x_TK), len(self.codes_NK), device=x_TK.device),
            self.unpacked().codes_NK,
        )
        for g in range(self.scales_NG.shape[1]):
            of_group = slice(g * size, (g + 1) * size)
            sums_TN = _product(codes_TGK[:, g], self._numbers(each_NK[:, of_group], g))
            y_TN += sums_TN.float() * (scales_TG[:, g, None] * self.scales_NG[:, g])
        if self.bias_N is not None:
            y_TN += self.bias_N
        return y_TN.to(x_TK.dtype)

    def dequantized(self) -> torch.Tensor:
        """Return W, [N, K], in float32."""
        groups_NGK = in_groups(self.unpacked().codes_NK, self.group_size)
        if self.is_float:
            return (self._floats(groups_NGK).float() * self.scales_NG[..., None]).flatten(1)
        zeros = float(1 << (self.bits - 1)) if self.zeros_NG is None else self.zeros_NG[..., None]
        weight_NK: torch.Tensor = ((groups_NGK.float() - zeros) * self.scales_NG[..., None]).flatten(1)
        return weight_NK if self.order_K is None else weight_NK[:, torch.argsort(self.order_K)]

    def with_outputs(self, order_N: torch.Tensor) -> QuantizedLinear:
        """The layer whose output i is output order_N[i] of this one."""
        return replace(
            self,
            codes_NK=self.codes_NK[order_N],
            scales_NG=self.scales_NG[order_N],
            zeros_NG=None if self.zeros_NG is None else self.zeros_NG[order_N],
            bias_N=None if self.bias_N is None else self.bias_N[order_N],
        )

    def to(self, device: torch.device) -> QuantizedLinear:
        """The same layer on `device`, packed on a GPU."""
        packed = self if device.type == "cpu" else self.packed()
        values = {each.name: getattr(packed, each.name) for each in fields(packed)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(packed, **moved)

    def packed(self) -> QuantizedLinear:
        """Two codes of 4 bits in a byte, where inputs are even."""
        if self.is_packed or self.bits != 4 or self.codes_NK.shape[1] % 2:
            return self
        codes_NK = self.codes_NK[:, ::2] | self.codes_NK[:, 1::2] << 4
        return replace(self, codes_NK=codes_NK, is_packed=True)

    def unpacked(self) -> QuantizedLinear:
        """One code in each byte."""
        if not self.is_packed:
            return self
        codes_NK = torch.stack([self.codes_NK & 15, self.codes_NK >> 4], -1).flatten(1)
        return replace(self, codes_NK=codes_NK, is_packed=False)

    def _numbers(self, codes_NK: torch.Tensor, g: int) -> torch.Tensor:
        """What codes of group g stand for, times its scale: integers, or FP8."""
        if self.is_float:
            return self._floats(codes_NK)
        zeros = 1 << (self.bits - 1) if self.zeros_NG is None else self.zeros_NG[:, g, None].to(torch.int16)
        return codes_NK.to(torch.int16) - zeros

    def _floats(self, codes: torch.Tensor) -> torch.Tensor:
        """FP8, or twice the numbers of FP4, int16."""
        return codes.view(torch.float8_e4m3fn) if self.bits == 8 else _FP4_TWICE.to(codes.device)[codes.int()]


Linear = DenseLinear | QuantizedLinear


def in_groups(x_TK: torch.Tensor, group_size: int) -> torch.Tensor:
    """A view [T, G, K / G]."""
    return x_TK.reshape(len(x_TK), x_TK.shape[1] // group_size, group_size)


def new_codes(n: int, k: int) -> torch.Tensor:
    """Memory for codes [N, K], which goes back to the system when it is freed."""
    return new_mapping(n * k).view(n, k) if n else torch.empty(0, k, dtype=torch.uint8)


def quantize_weight(weight_NK: torch.Tensor, *, bits: int, group_size: int) -> QuantizedLinear:
    """Quantize a dense weight: codes that are nearest to it, symmetric, with a scale for each group of a row.

    A scale may be negative: the value of the largest size in a group has the lowest code, of which there is one more
    than of the highest. The scale of a group with NaN or infinity is not finite. Source: Q4_0 of llama.cpp.
    """
    (n, k), middle = weight_NK.shape, 1 << (bits - 1)
    codes_NK, scales_NG = new_codes(n, k), torch.empty(n, k // group_size)
    step = max(_PIECE_ELEMENTS // k, 1)
    for first in range(0, n, step):  # float32 copies of a whole layer would be its largest by far
        groups_RGK = in_groups(weight_NK[first : first + step].float(), group_size)
        least_RG, most_RG = groups_RGK.amin(2), groups_RGK.amax(2)
        extreme_RG = torch.where(most_RG > -least_RG, most_RG, least_RG)
        scales_RG = torch.where(extreme_RG.abs() <= LEAST, 1.0, extreme_RG) / -middle
        codes_RGK = torch.round(groups_RGK / scales_RG[..., None]).clamp(-middle, middle - 1) + middle
        codes_NK[first : first + step] = codes_RGK.flatten(1)
        scales_NG[first : first + step] = scales_RG
    return QuantizedLinear(codes_NK=codes_NK, bits=bits, scales_NG=scales_NG, zeros_NG=None)


def stack(parts: Sequence[Linear], bias_N: torch.Tensor | None) -> Linear:
    """One layer for several of one kind with the same input, their outputs one after the other.

    Raises ModelError, to which the caller adds their names, where they have their inputs in different orders.
    """
    dense = [part.weight_NK for part in parts if isinstance(part, DenseLinear)]
    if dense:
        return DenseLinear(weight_NK=torch.cat(dense) if len(dense) > 1 else dense[0], bias_N=bias_N)
    return _stack_quantized([part for part in parts if isinstance(part, QuantizedLinear)], bias_N)


def _stack_quantized(parts: Sequence[QuantizedLinear], bias_N: torch.Tensor | None) -> QuantizedLinear:
    first = parts[0]
    if len({None if part.order_K is None else tuple(part.order_K.tolist()) for part in parts}) > 1:
        raise ModelError("are computed as one layer, but they have different g_idx")
    zeros = [part.zeros_NG for part in parts if part.zeros_NG is not None]
    codes_NK = first.codes_NK
    if len(parts) > 1:
        codes_NK = new_codes(sum(len(part.codes_NK) for part in parts), first.codes_NK.shape[1])
        torch.cat([part.codes_NK for part in parts], out=codes_NK)
    return replace(
        first,
        codes_NK=codes_NK,
        scales_NG=torch.cat([part.scales_NG for part in parts]),
        zeros_NG=torch.cat(zeros) if zeros else None,
        bias_N=bias_N,
    )


def _product(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """x W^T: float32 products of parts of K, which are short enough to be exact if codes are integers."""
    parts = zip(*(torch.split(each.float(), _EXACT_K, 1) for each in (x_TK, weight_NK)), strict=True)
    dtype = torch.float32 if x_TK.dtype.is_floating_point else torch.int32
    return torch.stack([(x @ w.T).to(dtype) for x, w in parts]).sum(0, dtype=dtype)
