"""Experts of a layer that share tensors [E, ...]: the tensors, and a reader of those of one expert.

gpt-oss names its tensors so. A dense weight [E, K, N] has the name of the projection alone, and what else a layer has
is behind `_`: biases [E, N], and the blocks and scales of MXFP4.

Shape suffixes: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shared.model.layer_records import Stacked
from shared.model.weight_source import TensorReader, TensorSpec

_WEIGHT, _BIAS = ".weight", ".bias"


def stacked_specs(tensors: Mapping[str, TensorSpec], stacked: Stacked) -> dict[str, TensorSpec]:
    """The tensors of all experts, by those of one."""
    return {
        _shared_name(name): TensorSpec((stacked.count, *_stored(name, spec.shape)), spec.types)
        for name, spec in tensors.items()
    }


@dataclass(frozen=True)
class ExpertReader:
    """The tensors of one expert."""

    source: TensorReader
    stacked: Stacked

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """A copy of a tensor, or of a part of it."""
        index = self.stacked.index
        tensor = self.source.read(_shared_name(name), (slice(index, index + 1),))[0]
        return (tensor.T.contiguous() if name.endswith(_WEIGHT) else tensor)[part]

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the tensor as one piece."""
        yield 0, self.read(name)


def _shared_name(name: str) -> str:
    if name.endswith(_BIAS):
        return f"{name.removesuffix(_BIAS)}_bias"
    return name.removesuffix(_WEIGHT)


def _stored(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if name.endswith(_WEIGHT) else shape
