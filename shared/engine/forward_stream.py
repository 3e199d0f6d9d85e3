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
from typing import Any, Protocol

import torch

from shared import log
from shared.engine.model_runner import Forwarded, ModelRunner, SampledTensors
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.vocab_mask import VocabMask
from shared.kvcache.host_pages import PageCopy
from shared.kvcache.host_pool import HostKVPool
from shared.scheduling.sampled import Sampled


class GenerationBatchResult(Protocol):
    """A forward that was launched and told to sample. Whoever holds it keeps its buffers alive."""

    def wait(self) -> Sampled:
        """Block until `copy_done`: what was sampled is on the host. Raises what the forward raised."""
        ...


class CopyResult(Protocol):
    """A copy between device and host that was launched."""

    def wait(self) -> float:
        """Block until it is done. Returns the seconds it took on the stream; raises what it raised."""
        ...


class ForwardStream(Protocol):
    """First in, first out, asynchronous. Called by the scheduler thread alone."""

    def submit(self, batch: ModelWorkerBatch) -> Any:
        """Launch a forward behind all those launched before. Give what it returns to `sample`, before the next."""
        ...

    def sample(self, forwarded: Any, vocab_mask: VocabMask | None = None) -> GenerationBatchResult:
        """Queue the sampling of the forward that `submit` launched last, under `vocab_mask`."""
        ...

    def copy(self, pages: PageCopy) -> CopyResult:
        """Copy KV pages to host memory or back, behind all forwards launched before and ahead of all later ones."""
        ...

    def close(self) -> None:
        """Finish what was launched, then end."""
        ...


@dataclass(frozen=True, slots=True)
class CpuCopyResult:
    """A copy that runs on the worker thread."""

    future: Future[float]

    def wait(self) -> float:
        """See CopyResult."""
        return self.future.result()


@dataclass(frozen=True, slots=True)
class CpuResult:
    """`copy_done` of a forward that runs on the worker thread."""

    future: Future[Sampled]

    def wait(self) -> Sampled:
        """See GenerationBatchResult."""
        return self.future.result()


class CpuForwardStream:
    """One worker thread. Native code that it runs lets go of the GIL: the scheduler's Python runs beside it.

    Where torch computes, the GIL is taken between its operations, and little Python hides (ADR 14).
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
        """See ForwardStream."""
        return self._worker.submit(self._runner.forward, batch)

    def sample(self, forwarded: Future[Forwarded], vocab_mask: VocabMask | None = None) -> CpuResult:
        """See ForwardStream."""
        return CpuResult(self._worker.submit(self._sample, forwarded, vocab_mask))

    def copy(self, pages: PageCopy) -> CpuCopyResult:
        """See ForwardStream."""
        return CpuCopyResult(self._worker.submit(self._copy, pages))

    def close(self) -> None:
        """See ForwardStream."""
        self._worker.shutdown()
        self._runner.close()

    def _copy(self, pages: PageCopy) -> float:
        assert self._host_pool is not None, "no host pages, no copies"
        start = time.perf_counter()
        self._host_pool.copy(pages)
        return time.perf_counter() - start

    def _sample(self, forwarded: Future[Forwarded], vocab_mask: VocabMask | None) -> Sampled:
        return self._runner.sample(forwarded.result(), vocab_mask).as_values()


def _stay_on(cores: Sequence[int]) -> None:
    """Of this thread alone: the scheduler, the links and the control thread go where there is time for them."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:  # a sandbox that forbids it, or a cpuset that has shrunk; right all the same
        log.warn("forward_not_pinned", cores=",".join(map(str, cores)), reason=error.strerror)


@dataclass(frozen=True, slots=True)
class CudaForwarded:
    """A queued forward; `batch` keeps its host arrays alive until `copy_done`."""

    forwarded: Forwarded
    batch: ModelWorkerBatch


@dataclass(frozen=True, slots=True)
class CudaResult:
    """`copy_done` of a forward on the CUDA stream."""

    on_host: SampledTensors
    copy_done: torch.cuda.Event
    launched: CudaForwarded
    vocab_mask: VocabMask | None

    def wait(self) -> Sampled:
        """See GenerationBatchResult."""
        self.copy_done.synchronize()
        return self.on_host.as_values()


@dataclass(frozen=True, slots=True)
class CudaCopyResult:
    """A copy between two events of the CUDA stream."""

    started: torch.cuda.Event
    done: torch.cuda.Event

    def wait(self) -> float:
        """See CopyResult."""
        self.done.synchronize()
        return float(self.started.elapsed_time(self.done)) / 1000


class CudaForwardStream:
    """A CUDA stream: kernels are queued from the calling thread, which goes on before they have run."""

    def __init__(self, runner: ModelRunner, host_pool: HostKVPool | None = None) -> None:
        self._runner = runner
        self._host_pool = host_pool
        self._stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]

    def submit(self, batch: ModelWorkerBatch) -> CudaForwarded:
        """See ForwardStream."""
        with torch.cuda.stream(self._stream):
            return CudaForwarded(self._runner.forward(batch), batch)

    def sample(self, forwarded: CudaForwarded, vocab_mask: VocabMask | None = None) -> CudaResult:
        """See ForwardStream."""
        with torch.cuda.stream(self._stream):
            on_host = self._runner.sample(forwarded.forwarded, vocab_mask).map(_start_copy_to_host)
            copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copy_done.record(self._stream)
        return CudaResult(on_host, copy_done, forwarded, vocab_mask)

    def copy(self, pages: PageCopy) -> CudaCopyResult:
        """See ForwardStream."""
        assert self._host_pool is not None, "no host pages, no copies"
        started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            started.record(self._stream)
            self._host_pool.copy(pages)
            done.record(self._stream)
        return CudaCopyResult(started, done)

    def close(self) -> None:
        """See ForwardStream."""
        self._stream.synchronize()
        self._runner.close()


def _start_copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def make_forward_stream(
    runner: ModelRunner, host_pool: HostKVPool | None = None, cores: Sequence[int] = ()
) -> CpuForwardStream | CudaForwardStream:
    """The stream for the runner's device; `host_pool` is what it copies KV pages to, if anything.

    On a CPU it runs on `cores`, or anywhere if there are none.
    """
    if runner.device.type == "cuda":
        return CudaForwardStream(runner, host_pool)
    return CpuForwardStream(runner, host_pool, cores)
