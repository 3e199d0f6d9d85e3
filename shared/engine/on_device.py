"""How host values reach the device: on a GPU through pinned memory, without waiting for the copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes: what a vector load of a GPU kernel asks of an address."""


def to_device(values: object, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Host values as a tensor on `device`."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def packed_to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Several host arrays as tensors on `device`: views of one block that a single copy brings there."""
    starts = np.cumsum(
        [0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values())]
    ).tolist()
    block = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host, parts = block.numpy(), dict(zip(arrays, starts, strict=False))
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host[parts[name] : parts[name] + array.nbytes] = flat
    there = block.to(device, non_blocking=True)
    return {
        name: there[parts[name] : parts[name] + array.nbytes].view(_TORCH[array.dtype.str]).view(array.shape)
        for name, array in arrays.items()
    }


_TORCH = {"<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32, "<f8": torch.float64}
