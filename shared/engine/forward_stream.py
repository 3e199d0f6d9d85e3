"""Where forwards run, in launch order, while the scheduler goes on: one thread on CPUs, one CUDA stream on GPUs.

A forward has two halves, each queued by itself: `submit` computes logits, `sample` draws from them. Between the
two the scheduler may commit the step before, which is what a mask that depends on it needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np
import torch

from shared import log
from shared.cuda_streams import CudaStreams
from shared.device_streams import FORWARD_PRIORITY
from shared.engine.cuda.forward_stream import CudaForwardStream
from shared.engine.model_runner import Forwarded, ModelRunner
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import VocabMask
from shared.kvcache.allocator import PageCopy
from shared.kvcache.host_pool import HostKVPool
from shared.scheduling.commit import Sampled

_CUDA_ERROR_MEMORY_ALLOCATION = 2
_TRITON_ERROR = "Triton Error [CUDA]: "
"""How Triton begins the text of a driver's error. It raises a plain RuntimeError."""

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work that was queued on the stream. Its holder keeps the buffers of the work alive."""

    def wait(self) -> T_co:
        """Block until the work is done. Returns its result, or raises what the work raised."""
        ...


GenerationBatchResult = Pending[Sampled]
"""A forward that was told to sample; `wait` returns when what it drew is on the host (SGLang's copy_done)."""
CopyResult = Pending[float]
"""A copy between device and host; `wait` returns the seconds that the copy took on the stream."""
Fence = Pending[None]
"""A point on the stream; `wait` returns when everything that was queued before it is done."""


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """Stands for a forward or a copy whose launch raised, perhaps after a part of its kernels was queued.

    Those kernels still write to pages, so the launch counts as over only behind `queued`.
    """

    error: Exception
    queued: Fence

    def wait(self) -> NoReturn:
        """Block until what was queued is done, then raise the error of the launch."""
        self.queued.wait()
        raise self.error


def is_out_of_memory(error: Exception) -> bool:
    """True for an allocation that failed, on the device or of pinned memory. The CUDA context is intact."""
    return (
        isinstance(error, torch.OutOfMemoryError)
        or str(error) == f"{_TRITON_ERROR}out of memory"
        or getattr(error, "error_code", None) == _CUDA_ERROR_MEMORY_ALLOCATION
    )


def is_device_lost(error: Exception) -> bool:
    """True for an error of the CUDA context (an illegal address, a device assert): every later call fails as well."""
    of_cuda = isinstance(error, torch.AcceleratorError) or str(error).startswith(_TRITON_ERROR)
    return of_cuda and not is_out_of_memory(error)


class ForwardStream(Protocol):
    """First in, first out, asynchronous. Called by the scheduler thread alone."""

    def submit(self, batch: ModelWorkerBatch) -> Any:
        """Launch a forward behind all those launched before. Give what it returns to `sample`, before the next."""
        ...

    def sample(
        self, forwarded: Any, vocab_mask: VocabMask[np.ndarray] | None = None
    ) -> GenerationBatchResult:
        """Queue the sampling of the forward that `submit` launched last, under `vocab_mask`."""
        ...

    def copy(self, pages: PageCopy) -> CopyResult:
        """Copy KV pages to host memory or back, behind all forwards launched before and ahead of all later ones."""
        ...

    def fence(self) -> Fence:
        """The point behind everything that is queued, what a call queued before it raised included."""
        ...

    def close(self) -> None:
        """Finish what was launched, then end."""
        ...


def failed_launch(stream: ForwardStream, error: Exception) -> FailedLaunch:
    """What stands for a launch on `stream` that raised `error`. Raises `error` where the device is lost."""
    if is_device_lost(error):
        raise error
    return FailedLaunch(error, stream.fence())


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CpuPending(Generic[T]):
    """Work of the worker thread."""

    future: Future[T]

    def wait(self) -> T:
        """Block until the worker has done it."""
        return self.future.result()


class CpuForwardStream:
    """One worker thread. Native code that it runs lets go of the GIL: the scheduler's Python runs beside it.

    Where torch computes, the GIL is taken between its operations, and little Python hides (ADR 12).
    """

    def __init__(
        self, runner: ModelRunner, host_pool: HostKVPool | None = None, cores: Sequence[int] = ()
    ) -> None:
        """The worker runs on `cores` alone, and so do the threads that torch starts from there; none: anywhere."""
        self._runner = runner
        self._host_pool = host_pool
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="forward", initializer=_stay_on, initargs=(cores,)
        )

    def submit(self, batch: ModelWorkerBatch) -> Future[Forwarded]:
        """Queue a forward for the worker."""
        return self._worker.submit(self._runner.forward, batch)

    def sample(
        self, forwarded: Future[Forwarded], vocab_mask: VocabMask[np.ndarray] | None = None
    ) -> CpuPending[Sampled]:
        """Queue its sampling; the result is on the host when the worker has drawn."""
        return CpuPending(self._worker.submit(self._sample, forwarded, vocab_mask))

    def copy(self, pages: PageCopy) -> CpuPending[float]:
        """Queue a copy for the worker."""
        return CpuPending(self._worker.submit(self._copy, pages))

    def fence(self) -> CpuPending[None]:
        """An empty piece of work behind everything that is queued."""
        return CpuPending(self._worker.submit(lambda: None))

    def close(self) -> None:
        """Finish what was queued, end the worker, and close the runner."""
        self._worker.shutdown()
        self._runner.close()

    def _copy(self, pages: PageCopy) -> float:
        assert self._host_pool is not None, "no host pages, no copies"
        start = time.perf_counter()
        self._host_pool.copy(pages)
        return time.perf_counter() - start

    def _sample(self, forwarded: Future[Forwarded], vocab_mask: VocabMask[np.ndarray] | None) -> Sampled:
        return self._runner.sample(forwarded.result(), vocab_mask).as_values()


def _stay_on(cores: Sequence[int]) -> None:
    """Pin the calling thread to `cores`; the node's other threads stay free to run on any core."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:  # A sandbox forbids it, or the cpuset has shrunk. Results do not depend on it.
        log.warn("forward_not_pinned", cores=",".join(map(str, cores)), reason=error.strerror)


def make_forward_stream(
    runner: ModelRunner,
    host_pool: HostKVPool | None = None,
    cores: Sequence[int] = (),
    *,
    sleeps: bool = False,
) -> CpuForwardStream | CudaForwardStream:
    """The stream for the runner's device; `host_pool` is what it copies KV pages to, if anything.

    On a CPU it runs on `cores`, or anywhere if there are none. On a GPU a thread that waits for it spins unless it
    `sleeps`.
    """
    if runner.device.type == "cuda":
        return CudaForwardStream(runner, host_pool, CudaStreams(runner.device, sleeps, FORWARD_PRIORITY))
    return CpuForwardStream(runner, host_pool, cores)
