"""Host memory: KV pages and staging slots, which are copied through all the time, and weights."""

from __future__ import annotations

import mmap

import torch

_HUGE_PAGE = 2 << 20


def new_mapping(nbytes: int) -> torch.Tensor:
    """uint8 memory that is there when it is touched, zeroed, and back with the system once nothing refers to it.

    What malloc gives back depends on what it has given out behind it: a model that was read layer by layer, each
    freed before the next, left a third of its size on the heap.
    """
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )


def new_host_buffer(nbytes: int) -> torch.Tensor:
    """Zeroed uint8 memory in huge pages, see `reserve_host_memory`.

    Touched at once: memory that is not there shows now, not in the middle of a request.
    """
    return reserve_host_memory(nbytes).zero_()


def reserve_host_memory(nbytes: int) -> torch.Tensor:
    """Zeros, uint8, each resident from its first use, in huge pages where the kernel grants them.

    That is where `transparent_hugepage` is not `never`. Pages of a KV pool are visited in random order, so with 4 KB
    pages most copies begin with TLB misses; and one core of a Zen 4 VM streams weights at 32 GB/s instead of 19.
    """
    if nbytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(nbytes, dtype=torch.uint8)
    area = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel built without them
        return torch.zeros(nbytes, dtype=torch.uint8)
    whole = torch.frombuffer(area, dtype=torch.uint8)  # keeps `area` alive, and unmaps it with the last view
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + nbytes]
