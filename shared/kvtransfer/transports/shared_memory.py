"""Staging slots in memory that a second process can read.

Each is a memfd: it has no name, so a process that is killed leaves nothing behind. The owner maps it for writing
and then seals it, so that the peer that is shown the descriptor can neither write nor shrink it.
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

_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1; Python's fcntl does not name it before 3.14. Mappings from now on are read-only."""
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
            fcntl.fcntl(
                self.descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            )
        except OSError as error:
            os.close(self.descriptor)
            raise LinkError(f"no shared memory for a slot of {nbytes} bytes: {error}") from None
        super().__init__(torch.frombuffer(area, dtype=torch.uint8))
        weakref.finalize(self, os.close, self.descriptor)  # the mapping ends with the last tensor on it


def map_read_only(descriptor: int) -> torch.Tensor:
    """The memory of a peer's SharedSlot, as a uint8 tensor that must not be written (that would be a SIGSEGV).

    Takes the descriptor over. LinkError: the peer could shrink it, which would end this process with a SIGBUS.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
            raise LinkError("the peer's shared memory is not sealed")
        nbytes = os.fstat(descriptor).st_size
        area = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
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
