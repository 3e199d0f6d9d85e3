"""What the readers of quantized formats share: the tensors that they ask for, and codes packed into int32.

Shape suffixes: N outputs, K inputs, G groups of K, W words of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from shared.errors import ModelError
from shared.model.linear import Linear, QuantizedLinear, new_codes
from shared.model.quantization import Layout, Scheme
from shared.model.weight_source import TensorReader, TensorSpec

ACTIVATION_GROUP = 128
"""Inputs that share a scale of activations where the format is of weights alone, with one scale for each output.

A scale for the whole token would lose two to five times as much. Inputs that it does not divide have groups of the
largest part of it that does, down to LEAST_GROUP.
"""
LEAST_GROUP = 32
_WEIGHTS_ALONE = (Layout.PACK_QUANTIZED, Layout.AWQ, Layout.GPTQ, Layout.GPTQ_V2)
_PIECE_WORDS = 1 << 15
PIECE_CODES = 16 << 20


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer of a checkpoint: its name, its sizes and how it is quantized."""

    name: str
    n: int
    k: int
    scheme: Scheme

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        if self.scheme.layout is Layout.ON_LOAD:
            return math.gcd(self.scheme.group_size or self.k, self.k)
        return self.scheme.group_size or self.k

    @property
    def num_groups(self) -> int:
        """How many groups the inputs have. Raises ModelError where they are no whole number."""
        num_groups, rest = divmod(self.k, self.group_size)
        if rest:
            raise ModelError(
                f"{self.name}: {self.k} inputs are no multiple of its group_size {self.group_size}"
            )
        return num_groups

    def words(self, num_codes: int) -> int:
        """Words of 32 bits that hold so many codes."""
        return -(-num_codes * self.scheme.bits // 32)

    def linear(
        self,
        codes_NK: torch.Tensor,
        scales_NG: torch.Tensor,
        zeros_NG: torch.Tensor | None,
        g_idx_K: torch.Tensor | None,
    ) -> QuantizedLinear:
        """The layer of these codes, in the order of its groups. Raises ModelError for a g_idx that is none."""
        order_K = None
        if g_idx_K is not None:
            order_K = torch.argsort(g_idx_K, stable=True)
            if not torch.equal(
                g_idx_K[order_K], torch.arange(self.k, dtype=g_idx_K.dtype) // self.group_size
            ):
                raise ModelError(f"{self.name}.g_idx: does not give {self.group_size} inputs to each group")
            if torch.equal(order_K, torch.arange(self.k)):
                order_K = None
        is_widened = self.scheme.layout in _WEIGHTS_ALONE and not self.scheme.is_weight_only
        size = math.gcd(ACTIVATION_GROUP, self.k)
        if is_widened and size >= LEAST_GROUP and self.num_groups == 1:
            num_groups = self.k // size
            scales_NG = scales_NG.expand(-1, num_groups)
            zeros_NG = None if zeros_NG is None else zeros_NG.expand(-1, num_groups)
        return QuantizedLinear(
            codes_NK=codes_NK if order_K is None else columns(codes_NK, order_K),
            bits=self.scheme.bits,
            scales_NG=finite(self.name, scales_NG.float()),
            zeros_NG=zeros_NG,
            order_K=order_K,
            is_weight_only=self.scheme.is_weight_only,
        )


@dataclass(frozen=True)
class Format:
    """How checkpoints of one format hold a linear layer."""

    tensors: Callable[[LinearSpec], dict[str, TensorSpec]]
    """The tensors of a layer by their full names."""
    read: Callable[[TensorReader, LinearSpec, torch.dtype], Linear]
    """Read a layer for activations of this type, without its bias. The tensors were checked."""

    def pieces(
        self, source: TensorReader, layer: LinearSpec, dtype: torch.dtype, *, num_codes: int = PIECE_CODES
    ) -> Iterator[tuple[int, Linear]]:
        """Yield (index of its first output, outputs) for pieces of a layer, which is never whole in memory.

        A piece has about `num_codes` codes, and whole words of 32 bits and blocks of FP8.
        """
        rows, _ = layer.scheme.block or (1, None)
        unit = math.lcm(32, rows)
        step = max(num_codes // (layer.k * unit), 1) * unit
        for first in range(0, layer.n, step):
            last = min(first + step, layer.n)
            before, until = (self.tensors(replace(layer, n=n)) for n in (first, last))
            parts = {name: _between(before[name].shape, until[name].shape) for name in until}
            yield first, self.read(_Parts(source, parts), replace(layer, n=last - first), dtype)


def _between(before: tuple[int, ...], until: tuple[int, ...]) -> tuple[slice, ...]:
    """The axis of the outputs is the one whose length depends on their number."""
    return tuple(slice(0 if a == b else a, b) for a, b in zip(before, until, strict=True))


@dataclass(frozen=True)
class _Parts:
    """Parts of the tensors of a source."""

    source: TensorReader
    parts: dict[str, tuple[slice, ...]]

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        return self.source.read(name, part or self.parts[name])

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.read(name)


def finite(layer: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales of a layer. Raises ModelError where one is NaN or infinite: every token of it would be lost."""
    if not bool(scales.isfinite().all()):
        raise ModelError(f"{layer}: a scale is not finite")
    return scales


def columns(codes_RC: torch.Tensor, order_C: torch.Tensor) -> torch.Tensor:
    """The columns of codes in another order."""
    out = new_codes(len(codes_RC), len(order_C))
    return torch.index_select(codes_RC, 1, order_C, out=out)


def unpack(words_RW: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """Codes [R, num_codes], uint8, of words that hold the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes_RC = new_codes(len(words_RW), num_codes)
    step = max(_PIECE_WORDS // words_RW.shape[1], 1)
    for first in range(0, len(words_RW), step):
        codes_SWC = (words_RW[first : first + step, :, None] >> shifts).bitwise_and_((1 << bits) - 1)
        codes_RC[first : first + step] = codes_SWC.flatten(1)[:, :num_codes]
    return codes_RC
