"""Staging slots in memory that a second process can read.

Each is a memfd: it has no name, so a process that is killed leaves nothing behind. The owner maps it for writing
and then seals it, so that the peer that is shown the descriptor cannot shrink it. The peer maps it read-only if its
pages are on a CPU. On a GPU it pins what it has mapped, and not every driver pins memory that cannot be written.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import torch

from shared.errors import LinkError
from shared.kvtransfer.staging import Slot

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedSlot(Slot):
    """A staging slot whose memory can be shown to another process. LinkError: there is none to be had."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.descriptor = os.memfd_create("baton-kv-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise LinkError(f"no shared memory: {error}") from None
        try:
            # Memory that is not there shows now, not as a SIGBUS in the middle of a gather.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            area = mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(self.descriptor)
            raise LinkError(f"no shared memory for a slot of {nbytes} bytes: {error}") from None
        super().__init__(torch.frombuffer(area, dtype=torch.uint8))
        weakref.finalize(self, os.close, self.descriptor)  # the mapping ends with the last tensor on it


def map_slot(descriptor: int, *, writable: bool = False) -> torch.Tensor:
    """The memory of a peer's SharedSlot, as a uint8 tensor. To write it is a SIGSEGV, unless it is `writable`.

    Takes the descriptor over. LinkError: the peer could shrink it, which would end this process with a SIGBUS.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
            raise LinkError("the peer's shared memory is not sealed")
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
