"""Random weights for `--load-format dummy`, made on the device from a config.json alone.

Every element comes from one table of random numbers, which is drawn on the host from the seed and copied to the
device once. A tensor is the table again and again, from a place that follows from the seed and the tensor's name. So
the weights have the same bits on every device and node, and making them costs about as much as writing them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import xxhash

from shared.model.weight_source import TensorSpec

TABLE_LENGTH = 1_048_583
"""A prime: no row length divides it, so the rows of a matrix differ."""
PIECE_ELEMENTS = 8 << 20
BIAS_STD = 0.02
FP4_STD = (137 / 16) ** 0.5
"""Of the numbers of FP4, each as likely as any other."""


class DummyWeights:
    """A WeightSource without files. Logits have a standard deviation of about 1 for any depth and width.

    That is 2 where norms add 1 to their weight. The weights of norms are 1. Elements of a matrix are uniform with a
    variance of 1 / its width, so that each product has the variance of its input. The embedding table has the same
    scale, since it may be the lm_head too. Blocks of MXFP4 are random bits, and their scales the power of two with
    which products come nearest to that.
    """

    def __init__(self, seed: int, device: torch.device, *, piece_elements: int = PIECE_ELEMENTS) -> None:
        self._piece_elements = piece_elements
        self._seed = seed
        self._device = device
        self._tensors: Mapping[str, TensorSpec] = {}
        drawn = np.random.default_rng(seed).random(TABLE_LENGTH, dtype=np.float32)
        self._table = torch.from_numpy((2 * drawn - 1) * np.float32(math.sqrt(3))).to(device)
        """Uniform with mean 0 and variance 1."""
        self._bits = torch.from_numpy((drawn * np.float32(256)).astype(np.uint8)).to(device)

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Take the shapes from the architecture: nothing can be missing."""
        self._tensors = tensors

    def dtype(self, name: str) -> torch.dtype:
        """The type of the table, or of MXFP4. A tensor is converted when it is copied."""
        return torch.uint8 if "U8" in self._tensors[name].types else torch.float32

    def mapped(self, name: str) -> torch.Tensor:
        """A new tensor."""
        return self.read(name)

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """A new tensor, or a part of it. No more rows are made than `part` has."""
        num_rows, *width = self._tensors[name].shape
        first, last, _ = (part[0] if part else slice(None)).indices(num_rows)
        out = torch.empty((last - first, *width), dtype=self.dtype(name), device=self._device)
        self._fill(name, first * math.prod(width), out)
        return out[(slice(None), *part[1:])]

    def copy_tensor(self, name: str, out: torch.Tensor, on_copied: Callable[[int], None]) -> None:
        """Fill `out`, in its type."""
        self._fill(name, 0, out)
        on_copied(out.numel())

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of its first row, rows in float32) for pieces of a tensor."""
        num_rows, *width = self._tensors[name].shape
        elements_a_row = math.prod(width)
        step = max(self._piece_elements // elements_a_row, 1)
        for first_row in range(0, num_rows, step):
            piece = torch.empty((min(step, num_rows - first_row), *width), device=self._device)
            self._fill(name, first_row * elements_a_row, piece)
            yield first_row, piece

    def close(self) -> None:
        """Do nothing: the table goes with this object."""

    def _fill(self, name: str, first: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements of a tensor from index `first` on."""
        shape = self._tensors[name].shape
        if name.endswith("norm.weight"):
            out.fill_(1)
            return
        if name.endswith("_scales"):
            out.fill_(127 + round(math.log2((32 * shape[-1]) ** -0.5 / FP4_STD)))
            return
        table, flat = self._bits, out.view(-1)
        if out.dtype != torch.uint8:
            table = self._table * (BIAS_STD if len(shape) == 1 else shape[1] ** -0.5)
        at = (xxhash.xxh3_64_intdigest(name.encode(), seed=self._seed) + first) % TABLE_LENGTH
        done = 0
        while done < len(flat):
            length = min(TABLE_LENGTH - at, len(flat) - done)
            flat[done : done + length] = table[at : at + length]
            done, at = done + length, 0
