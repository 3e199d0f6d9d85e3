"""How host values reach the device: packed into one block, which one copy brings there while the host goes on.

On a CPU a block is plain memory, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

ALIGNMENT = 16
"""Bytes: what a vector load of a GPU kernel asks of an address."""
_SMALLEST_NBYTES = 1 << 16


class Event(Protocol):
    """A point on a stream. torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Block until the stream has come to the point."""
        ...


StartCopy = Callable[[torch.Tensor, torch.Tensor], Event]
"""(to, from): queues a copy on the current stream, and returns the point behind it."""


class _Passed:
    """A point that lies behind."""

    def synchronize(self) -> None:
        """Return at once."""


def start_copy_to(device: torch.device) -> StartCopy | None:
    """How blocks are copied to `device`; None where the device reads host memory."""
    if device.type == "cpu":
        return None
    return _start_cuda_copy if device.type == "cuda" else _copy


def _start_cuda_copy(to: torch.Tensor, source: torch.Tensor) -> Event:
    to.copy_(source, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copied


def _copy(to: torch.Tensor, source: torch.Tensor) -> Event:
    to.copy_(source)
    return _Passed()


class BlockRing:
    """One block on the device, and two pinned blocks on the host that take turns to be copied there.

    The device's block is written and read on one stream, so a copy waits for the kernels that read the block before.
    A host block is filled again once its own copy is done. At most one forward is in flight when the next one is
    launched, so the copy that `fill` waits for belongs to a forward whose result the scheduler has seen.

    torch's allocator of pinned memory holds a block back that was freed, until the copies from it are done: a ring
    may be dropped behind `send`. It does not keep the host from writing to a block that lives, so `fill` waits.
    """

    def __init__(self, nbytes: int, device: torch.device, start_copy: StartCopy | None) -> None:
        self.nbytes = nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._start_copy = start_copy
        self._hosts = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(1 if start_copy is None else 2)
        ]
        self._copied: list[Event] = [_Passed() for _ in self._hosts]
        self._turn = 0
        self.on_device = (
            self._hosts[0] if start_copy is None else torch.empty(nbytes, dtype=torch.uint8, device=device)
        )

    def fill(self) -> np.ndarray:
        """The host block whose turn it is, uint8. Its contents are those of an earlier forward."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._copied[self._turn].synchronize()
        host: np.ndarray = self._hosts[self._turn].numpy()
        return host

    def send(self, nbytes: int) -> None:
        """Queue the copy of the first `nbytes` of the block that `fill` returned."""
        if self._start_copy is not None:
            host = self._hosts[self._turn]
            self._copied[self._turn] = self._start_copy(self.on_device[:nbytes], host[:nbytes])


class Uploads:
    """Brings arrays to the device, all those of one call in one copy. Called on one stream.

    The tensors of a call are good until the next one. Its blocks grow to what the largest call has needed; they are
    allocated on the stream that uses them, so the device's memory is reused behind the kernels that read it.
    """

    def __init__(self, device: torch.device, start_copy: StartCopy) -> None:
        self._device = device
        self._start_copy = start_copy
        self._ring: BlockRing | None = None

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Each array as a tensor on the device."""
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        if not ends:
            return []
        if self._ring is None or self._ring.nbytes < ends[-1]:
            nbytes = max(2 * ends[-1], _SMALLEST_NBYTES)
            self._ring = BlockRing(nbytes, self._device, self._start_copy)
        host, there = self._ring.fill(), self._ring.on_device
        tensors = []
        for start, array in zip([0, *ends], arrays, strict=False):
            part = slice(start, start + array.nbytes)
            host[part] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tensors.append(there[part].view(_TORCH[array.dtype.str]).view(array.shape))
        self._ring.send(ends[-1])
        return tensors


_TORCH = {"<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32, "<f8": torch.float64}
