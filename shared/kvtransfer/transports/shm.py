"""Links over host memory that two processes of one host share.

Each staging slot is a memfd: it has no name, so a process that is killed leaves nothing behind. The peer is shown the
descriptor, and maps it read-only if its pages are on a CPU. Where pages are on GPUs, slots are registered with CUDA,
so that both processes copy from and to them at the speed of the bus; not every driver pins memory that cannot be
written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shared import log
from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError, LinkError
from shared.kvtransfer.link import Link, LinkSpec
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.common import not_one_host
from shared.kvtransfer.transports.unix_link import build_unix_link
from shared.protocol.transfer_messages import Place

if TYPE_CHECKING:
    from shared.kvtransfer.transports.cuda.cuda_runtime import CudaRuntime


class SharedSlot(Slot):
    """A staging slot whose memory can be shown to another process. LinkError: there is none to be had."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.descriptor = os.memfd_create("baton-kv-slot", os.MFD_CLOEXEC)
        except OSError as error:
            raise LinkError(f"no shared memory: {error}") from None
        try:
            # Memory that is not there shows now, not as a SIGBUS in the middle of a gather.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            area = mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(self.descriptor)
            raise LinkError(f"no shared memory for a slot of {nbytes} bytes: {error}") from None
        super().__init__(torch.frombuffer(area, dtype=torch.uint8))
        weakref.finalize(self, os.close, self.descriptor)  # the mapping ends with the last tensor on it


def map_slot(descriptor: int, *, writable: bool = False) -> torch.Tensor:
    """The memory of a peer's SharedSlot, as a uint8 tensor. To write it is a SIGSEGV, unless it is `writable`.

    Takes the descriptor over. LinkError: it cannot be mapped.
    """
    try:
        nbytes = os.fstat(descriptor).st_size
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        area = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=prot)
    except (OSError, ValueError) as error:
        raise LinkError(f"the peer's shared memory cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)
    # torch warns of read-only buffers, so it is shown the address instead; the view keeps the mapping alive.
    view = (ctypes.c_uint8 * nbytes).from_address(_address(area))
    view.area = area  # type: ignore[attr-defined]
    return torch.frombuffer(view, dtype=torch.uint8)


def _address(area: mmap.mmap) -> int:
    import numpy as np

    address: int = np.frombuffer(area, dtype=np.uint8).ctypes.data
    return address


class ShmLinkFactory:
    """Builds links to processes of this host. On a GPU it has a `runtime`."""

    def __init__(
        self, options: TransferOptions, threads: DeviceThreads, runtime: CudaRuntime | None = None
    ) -> None:
        try:
            SharedSlot(1)
        except LinkError as error:
            raise ConfigError(f"--kv-transfer shm: {error}") from None
        self._options = options
        self._threads = threads
        self._runtime = runtime

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return not_one_host(ours, theirs)

    def new_slot(self, nbytes: int) -> Slot:
        runtime = self._runtime
        slot = SharedSlot(nbytes)
        if runtime is not None:
            runtime.register(slot.buffer)
            weakref.finalize(slot, runtime.unregister, slot.buffer).atexit = False
        return slot

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        assert block, "a socket is waited for by blocking"
        return build_unix_link(spec, self._options, MemfdSharing(self._runtime), on_dead, self._threads)


class MemfdSharing:
    """Passes the memfd of a slot, which the receiver maps. A payload may be read as soon as its record is there."""

    def __init__(self, runtime: CudaRuntime | None) -> None:
        self._runtime = runtime
        self._registered: list[torch.Tensor] = []

    def show(self, slot: Slot) -> tuple[bytes, int]:
        assert isinstance(slot, SharedSlot)
        return b"", slot.descriptor

    def see(self, shown: bytes, descriptor: int) -> Slot:
        memory = map_slot(descriptor, writable=self._runtime is not None)
        if self._runtime is not None:
            self._runtime.register(memory)
            self._registered.append(memory)
        return Slot(memory)

    def close(self) -> None:
        for memory in self._registered:
            assert self._runtime is not None
            try:
                self._runtime.unregister(memory)
            except LinkError as error:  # the device is lost, and with it this process
                log.warn("shm_slot_stays_pinned", reason=error)
        self._registered.clear()
