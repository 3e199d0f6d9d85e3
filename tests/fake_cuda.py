"""A CUDA runtime without a GPU: device memory is a memfd, which other processes open by its place in /proc.

It is as strict as the documentation of CUDA: freeing memory that another process has mapped is a defect. Small blocks
share an allocation, and another process maps all of it. Host memory that is pinned can be written.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import torch

from shared.errors import LinkError

_NAME = "baton-kv-slot-fake"
"""Found by what counts mappings of slots."""
ALLOCATION_NBYTES = 2 << 20
"""Blocks that are no multiple of this lie in allocations of this size, one behind the other."""


class FakeRuntime:
    """The calls of one process, which counts what is there.

    `without_ipc` is a container that forbids it.
    """

    def __init__(self, *, without_ipc: bool = False) -> None:
        self._without_ipc = without_ipc
        self._memory: dict[int, _Memory] = {}
        """Allocated or mapped, by address. Small blocks have their allocation in common."""
        self._shared: tuple[_Memory, int] | None = None
        """The newest allocation of small blocks, and how much of it is taken."""
        self.registered: set[int] = set()

    def malloc(self, nbytes: int) -> int:
        if nbytes % ALLOCATION_NBYTES == 0:
            memory, at = _Memory(_new_area(nbytes), is_own=True), 0
        else:
            memory, at = self._shared or (_Memory(_new_area(ALLOCATION_NBYTES), is_own=True), 0)
            if at + nbytes > ALLOCATION_NBYTES:
                memory, at = _Memory(_new_area(ALLOCATION_NBYTES), is_own=True), 0
            self._shared = memory, at + -(-nbytes // 512) * 512
        self._memory[memory.address + at] = memory
        return memory.address + at

    def free(self, address: int) -> None:
        memory = self._memory.pop(address)
        if memory not in self._memory.values():
            memory.free()
            self._shared = None if self._shared and self._shared[0] is memory else self._shared

    def ipc_handle(self, address: int) -> bytes:
        return _place(self._memory[address].descriptor)

    def open(self, handle: bytes) -> torch.Tensor:
        if self._without_ipc:
            raise LinkError("cudaIpcOpenMemHandle: invalid device context")
        memory = _Memory(_open(handle), is_own=False)
        self._memory[memory.address] = memory
        return self.tensor(memory.address, len(memory.area))

    def close(self, address: int) -> None:
        memory = self._memory.pop(address)
        assert not memory.is_own
        fcntl.flock(memory.descriptor, fcntl.LOCK_UN)  # tensors over the area may live a moment longer
        os.close(memory.descriptor)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        memory = self._memory[address]
        at = address - memory.address
        assert at + nbytes <= len(memory.area), (
            "a tensor is larger than its memory: a GPU would read or write beyond it"
        )
        return torch.frombuffer(memory.area, dtype=torch.uint8)[at : at + nbytes]

    def register(self, memory: torch.Tensor) -> None:
        if not is_writable(memory.data_ptr()):  # drivers differ in whether they pin it
            raise LinkError("cudaHostRegister: operation not supported")
        assert memory.data_ptr() not in self.registered
        self.registered.add(memory.data_ptr())

    def unregister(self, memory: torch.Tensor) -> None:
        self.registered.remove(memory.data_ptr())

    @property
    def num_areas(self) -> int:
        """Memory that is allocated or mapped here."""
        return len(self._memory)


class _Memory:
    """One mapping. A process that maps another's memory has a lock on it, which the kernel drops with the process."""

    def __init__(self, descriptor: int, *, is_own: bool) -> None:
        self.descriptor = descriptor
        self.is_own = is_own
        if not is_own:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        self.area = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.address = int(np.frombuffer(self.area, dtype=np.uint8).ctypes.data)

    def free(self) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AssertionError("memory was freed that another process has mapped") from None
        finally:
            os.close(self.descriptor)


def _new_area(nbytes: int) -> int:
    descriptor = os.memfd_create(_NAME)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def is_writable(address: int) -> bool:
    """Whether this process has memory mapped there that it can write."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, access, *_ = line.split()
        first, last = (int(end, 16) for end in area.split("-"))
        if first <= address < last:
            return "w" in access
    return False


def _place(descriptor: int) -> bytes:
    return f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")


def _open(handle: bytes) -> int:
    try:
        return os.open(handle.rstrip(b"\0"), os.O_RDWR)
    except OSError as error:
        raise LinkError(f"cudaIpcOpenMemHandle: {error}") from None
