"""Where the tensors of a model come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

FLOATS = ("F64", "F32", "F16", "BF16")
"""As a safetensors header names them."""


class TensorSpec(NamedTuple):
    """What a tensor must be."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = FLOATS


class TensorReader(Protocol):
    """What readers of formats need of a `WeightSource`, or of a part of one."""

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """A copy of a tensor, or of a part of it, of its type."""
        ...

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of its first row, rows) for pieces of a tensor. A piece is good until the next is taken."""
        ...


class WeightSource(TensorReader, Protocol):
    """A `Checkpoint`, or `DummyWeights`."""

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raise ModelError unless all these tensors can be had. Called once, before the other methods."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        ...

    def mapped(self, name: str) -> torch.Tensor:
        """A tensor of that type."""
        ...

    def copy_tensor(self, name: str, out: torch.Tensor, on_copied: Callable[[int], None]) -> None:
        """Copy a tensor into `out`, converted to its type. `on_copied` gets the number of elements of each piece."""
        ...

    def close(self) -> None:
        """Close files. Tensors from `mapped` stay valid."""
        ...
