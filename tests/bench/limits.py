"""What this machine can do at best: streaming reads, memcpy, and oneDNN's GEMM, each to be measured beside a bench.

A limit is an object that is made once and measured many times, in turn with what is compared to it:

    limit = StreamingRead(cores)
    for _ in range(rounds):
        read_gb_s.append(limit.gb_s())
        step_s.append(...)

Memory limits are C++ (limits.cpp), one thread a core; without a compiler torch's own sum and copy stand in, and
`method` says so.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import linear

from shared.host_memory import new_host_buffer
from shared.kernels.cpu.build import NativeUnavailable, open_library
from tests.bench.machine import last_level_cache_nbytes

CACHES = 8
"""A buffer has the size of so many last-level caches, within the next two."""
LEAST_NBYTES = 256 << 20
MOST_NBYTES = 1 << 30
SHORTEST_S = 5e-3
"""A GEMM is repeated until a measurement takes so long."""


class StreamingRead:
    """Reading memory once, front to back, by one thread on each of `cores`."""

    def __init__(self, cores: Sequence[int], *, nbytes: int | None = None, native: bool = True) -> None:
        self._memory = _MemoryLimits(cores, native=native)
        self._buffer = _touched(nbytes or uncached_nbytes())
        self.method = self._memory.method

    def gb_s(self) -> float:
        """1e9 bytes a second, of one pass."""
        return self._buffer.nbytes / self._memory.read_s(self._buffer) / 1e9


class Memcpy:
    """Copying memory, by one thread on each of `cores`."""

    def __init__(self, cores: Sequence[int], *, nbytes: int | None = None, native: bool = True) -> None:
        self._memory = _MemoryLimits(cores, native=native)
        self._from, self._to = (_touched(nbytes or uncached_nbytes()) for _ in range(2))
        self.method = self._memory.method

    def gb_s(self) -> float:
        """1e9 bytes copied a second, of one pass. Each is read once and written once."""
        return self._from.nbytes / self._memory.copy_s(self._to, self._from) / 1e9


class Gemm:
    """oneDNN's x[m, k] @ w[n, k]^T in bfloat16 on `num_threads`, by the faster of plain and packed weights.

    The weights stay in the last-level cache if they fit: this is what the arithmetic takes, not the memory.
    """

    def __init__(self, m: int, n: int, k: int, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn((m, k), generator=generator).bfloat16()
        self._weight = torch.randn((n, k), generator=generator).bfloat16()
        self.flops = 2 * m * n * k
        self._packed: torch.Tensor | None = None
        self._repeats = 1
        best_s = min(self.seconds() for _ in range(3))
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, m)
            packed_s = min(self.seconds() for _ in range(3))
            if packed_s > best_s:
                self._packed = None
            best_s = min(best_s, packed_s)
        self._repeats = max(1, round(SHORTEST_S / best_s))

    @property
    def method(self) -> str:
        """Which of the two is the faster one."""
        return "plain" if self._packed is None else "packed"

    @torch.inference_mode()
    def seconds(self) -> float:
        """Of one multiplication."""
        with torch_threads(self._num_threads):
            start = time.perf_counter()
            for _ in range(self._repeats):
                if self._packed is None:
                    linear(self._x, self._weight)
                else:
                    torch.ops.mkldnn._linear_pointwise(self._x, self._packed, None, "none", [], "")
            return (time.perf_counter() - start) / self._repeats


SPINNING_S = 0.02
"""OpenMP's threads spin for some milliseconds behind torch's last call, on the cores of what is measured next."""


class Gemms:
    """Several GEMMs with the same m, as those of a decoder layer are."""

    def __init__(self, m: int, shapes: Sequence[tuple[int, int]], num_threads: int = 1) -> None:
        self._gemms = [Gemm(m, n, k, num_threads) for n, k in shapes]

    def gflop_s(self) -> float:
        """1e9 floating point operations a second, of all after each other."""
        flops = sum(gemm.flops for gemm in self._gemms)
        seconds = sum(gemm.seconds() for gemm in self._gemms)
        time.sleep(SPINNING_S)
        return flops / seconds / 1e9


class _MemoryLimits:
    """limits.cpp on some cores, or torch in its place."""

    def __init__(self, cores: Sequence[int], *, native: bool) -> None:
        self._library = _library() if native else None
        self._cores = (ctypes.c_int * len(cores))(*cores)

    @property
    def method(self) -> str:
        return "torch" if self._library is None else "C++, one pinned thread a core"

    def read_s(self, buffer: torch.Tensor) -> float:
        if self._library is None:
            return self._by_torch(lambda: buffer.view(torch.int64).sum())
        seconds: float = self._library.baton_read_s(
            buffer.data_ptr(), buffer.nbytes, self._cores, len(self._cores)
        )
        return seconds

    def copy_s(self, to: torch.Tensor, source: torch.Tensor) -> float:
        if self._library is None:
            return self._by_torch(lambda: to.copy_(source))
        seconds: float = self._library.baton_memcpy_s(
            to.data_ptr(), source.data_ptr(), source.nbytes, self._cores, len(self._cores)
        )
        return seconds

    def _by_torch(self, work: Callable[[], object]) -> float:
        with torch_threads(len(self._cores)):
            start = time.perf_counter()
            work()
            return time.perf_counter() - start


@contextmanager
def torch_threads(num: int) -> Iterator[None]:
    """Torch's operations on `num` threads, whatever an engine of this process has chosen for itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _library() -> ctypes.CDLL | None:
    """limits.cpp, or None where it cannot be built."""
    try:
        library = open_library("bench-limits", [Path(__file__).with_suffix(".cpp")])
    except NativeUnavailable as error:
        print(f"limits are torch's: {error}", file=sys.stderr)
        return None
    cores = ctypes.POINTER(ctypes.c_int)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.baton_read_s.argtypes = (address, size, cores, ctypes.c_int)
    library.baton_memcpy_s.argtypes = (address, address, size, cores, ctypes.c_int)
    for function in (library.baton_read_s, library.baton_memcpy_s):
        function.restype = ctypes.c_double
    return library


def uncached_nbytes() -> int:
    """So many that a pass over them finds nothing of the pass before in a cache."""
    return min(max(CACHES * last_level_cache_nbytes(), LEAST_NBYTES), MOST_NBYTES)


def _touched(nbytes: int) -> torch.Tensor:
    return new_host_buffer(nbytes).fill_(1)
