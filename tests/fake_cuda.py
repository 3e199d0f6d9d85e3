"""A CUDA runtime without a GPU: device memory is a memfd, which other processes open by its place in /proc.

It is as strict as the documentation of CUDA: freeing memory that another process has mapped is a defect. An event
that is held back stays unfinished, as that of a stream whose kernels have not run.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import numpy as np
import torch

from shared.errors import LinkError

_NAME = "baton-kv-slot-fake"
"""Found by what counts mappings of slots."""


class FakeRuntime:
    """The calls of one process, which counts what is there.

    `without_ipc` is a container that forbids it. `pins_read_only` is False for drivers that pin no read-only memory.
    """

    def __init__(self, *, without_ipc: bool = False, pins_read_only: bool = True) -> None:
        self._without_ipc = without_ipc
        self._pins_read_only = pins_read_only
        self._memory: dict[int, _Memory] = {}
        """Allocated or mapped, by address."""
        self.registered: set[int] = set()
        self.events: weakref.WeakSet[FakeEvent] = weakref.WeakSet()
        """Those of this process."""

    def malloc(self, nbytes: int) -> int:
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, nbytes)
        memory = _Memory(descriptor, is_own=True)
        self._memory[memory.address] = memory
        return memory.address

    def free(self, address: int) -> None:
        self._memory.pop(address).free()

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

    def new_event(self) -> FakeEvent:
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, 16)
        event = FakeEvent(descriptor)
        self.events.add(event)
        return event

    def open_event(self, handle: bytes) -> FakeEvent:
        return FakeEvent(_open(handle))

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        area = self._memory[address].area
        assert nbytes <= len(area), "a tensor is larger than its memory: a GPU would read or write beyond it"
        return torch.frombuffer(area, dtype=torch.uint8)[:nbytes]

    def register(self, memory: torch.Tensor, *, read_only: bool) -> None:
        if read_only and not self._pins_read_only:
            raise LinkError("cudaHostRegister: operation not supported")
        if not read_only:
            memory[0] = 0  # what CUDA pins for writing can be written
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


class FakeEvent:
    """Two counters that processes share: how often it was recorded, and how many of these are over."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._recorded, self._over = range(2)
        self._counts = np.frombuffer(mmap.mmap(descriptor, 16), dtype=np.int64)
        self.is_held = False

    def record(self) -> None:
        self._counts[self._recorded] += 1
        if not self.is_held:
            self.finish()

    def finish(self) -> None:
        """All that was recorded is over."""
        self._counts[self._over] = self._counts[self._recorded]

    def query(self) -> bool:
        return bool(self._counts[self._over] == self._counts[self._recorded])

    def ipc_handle(self) -> bytes:
        return _place(self._descriptor)


def _place(descriptor: int) -> bytes:
    return f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")


def _open(handle: bytes) -> int:
    try:
        return os.open(handle.rstrip(b"\0"), os.O_RDWR)
    except OSError as error:
        raise LinkError(f"cudaIpcOpenMemHandle: {error}") from None
