"""Where forwards run, in launch order, while the scheduler goes on: one thread on CPUs, one CUDA stream on GPUs.

A forward has two halves, each queued by itself: `submit` computes logits, `sample` draws from them. Between the
two the scheduler may commit the step before, which is what a mask that depends on it needs.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shared.engine.model_runner import Forwarded, ModelRunner
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.scheduling.sampled import Sampled


class GenerationBatchResult(Protocol):
    """A forward that was launched and told to sample. Whoever holds it keeps its buffers alive."""

    def wait(self) -> Sampled:
        """Block until `copy_done`: what was sampled is on the host. Raises what the forward raised."""
        ...


class ForwardStream(Protocol):
    """First in, first out, asynchronous. Called by the scheduler thread alone."""

    def submit(self, batch: ModelWorkerBatch) -> Any:
        """Launch a forward behind all those launched before. Give what it returns to `sample`, before the next."""
        ...

    def sample(self, forwarded: Any) -> GenerationBatchResult:
        """Queue the sampling of the forward that `submit` launched last."""
        ...

    def close(self) -> None:
        """Finish what was launched, then end."""
        ...


@dataclass(frozen=True, slots=True)
class CpuResult:
    """`copy_done` of a forward that runs on the worker thread."""

    future: Future[Sampled]

    def wait(self) -> Sampled:
        """See GenerationBatchResult."""
        return self.future.result()


class CpuForwardStream:
    """One worker thread. Right but weak as overlap: torch calls hold the GIL in between, so little Python hides."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def submit(self, batch: ModelWorkerBatch) -> Future[Forwarded]:
        """See ForwardStream."""
        return self._worker.submit(self._runner.forward, batch)

    def sample(self, forwarded: Future[Forwarded]) -> CpuResult:
        """See ForwardStream."""
        return CpuResult(self._worker.submit(self._sample, forwarded))

    def close(self) -> None:
        """See ForwardStream."""
        self._worker.shutdown()

    def _sample(self, forwarded: Future[Forwarded]) -> Sampled:
        return Sampled(self._runner.sample(forwarded.result()).tolist())


@dataclass(frozen=True, slots=True)
class CudaForwarded:
    """A queued forward; `batch` keeps its host arrays alive until `copy_done`."""

    forwarded: Forwarded
    batch: ModelWorkerBatch


@dataclass(frozen=True, slots=True)
class CudaResult:
    """`copy_done` of a forward on the CUDA stream."""

    host_tokens_S: torch.Tensor
    copy_done: torch.cuda.Event
    launched: CudaForwarded

    def wait(self) -> Sampled:
        """See GenerationBatchResult."""
        self.copy_done.synchronize()
        return Sampled(self.host_tokens_S.tolist())


class CudaForwardStream:
    """A CUDA stream: kernels are queued from the calling thread, which goes on before they have run."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]

    def submit(self, batch: ModelWorkerBatch) -> CudaForwarded:
        """See ForwardStream."""
        with torch.cuda.stream(self._stream):
            return CudaForwarded(self._runner.forward(batch), batch)

    def sample(self, forwarded: CudaForwarded) -> CudaResult:
        """See ForwardStream."""
        with torch.cuda.stream(self._stream):
            tokens_S = self._runner.sample(forwarded.forwarded)
            host_S = torch.empty(tokens_S.shape, dtype=tokens_S.dtype, pin_memory=True)
            host_S.copy_(tokens_S, non_blocking=True)
            copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copy_done.record(self._stream)
        return CudaResult(host_S, copy_done, forwarded)

    def close(self) -> None:
        """See ForwardStream."""
        self._stream.synchronize()


def make_forward_stream(runner: ModelRunner) -> CpuForwardStream | CudaForwardStream:
    """The stream for the runner's device."""
    return CudaForwardStream(runner) if runner.device.type == "cuda" else CpuForwardStream(runner)
