"""The memory of one GPU, in bytes, as a node that starts measures it."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Of all processes on the GPU: `total`, `free`. Of this process's tensors: `held`, `peak`."""

    def total(self) -> int:
        """Memory of the GPU, used or not."""
        ...

    def free(self) -> int:
        """What no process has taken."""
        ...

    def held(self) -> int:
        """What the allocator of this process has taken, for tensors and to keep for later ones."""
        ...

    def peak(self) -> int:
        """The most that `held` was since `reset`."""
        ...

    def reset(self) -> None:
        """Give back what no tensor uses, and forget the peak. Nothing runs on the GPU."""
        ...


class CudaMemory:
    """Torch's allocator on one GPU. The CUDA context and kernels are in `free`, and not in `held`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """Of the driver."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """Of the driver."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        """Reserved bytes: an allocation may be smaller than the block that it is cut from."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Most reserved bytes."""
        return torch.cuda.max_memory_reserved(self._device)

    def reset(self) -> None:
        """Wait for the GPU, empty the allocator's cache, and begin a new peak."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def gpu_uuid(device: torch.device) -> str:
    """The name of a GPU that is the same in every process of the host, whatever CUDA_VISIBLE_DEVICES is."""
    return str(torch.cuda.get_device_properties(device).uuid)
