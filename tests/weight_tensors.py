"""All tensors of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shared.model.weights import DecoderWeights


def tensors_of(weights: DecoderWeights) -> list[torch.Tensor]:
    """Those of the decoder, of its layers and of their linear layers."""
    return list(_tensors_in(weights))


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors_in(each)
    elif hasattr(value, "__dataclass_fields__"):
        for each in vars(value).values():
            yield from _tensors_in(each)
