"""Where forwards run, in launch order, while the scheduler goes on: one thread on CPUs, one CUDA stream on GPUs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.engine.model_runner import ModelRunner
from shared.engine.model_worker_batch import ModelWorkerBatch


class GenerationBatchResult(Protocol):
    """A forward that was launched. Whoever holds it keeps its buffers alive."""

    def wait(self) -> list[int]:
        """Block until `copy_done`: the sampled tokens are on the host. Raises what the forward raised."""
        ...


class ForwardStream(Protocol):
    """First in, first out, asynchronous. Called by the scheduler thread alone."""

    def submit(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Launch a forward behind all those launched before."""
        ...

    def close(self) -> None:
        """Finish what was launched, then end."""
        ...


@dataclass(frozen=True, slots=True)
class CpuResult:
    """`copy_done` of a forward that runs on the worker thread."""

    future: Future[list[int]]

    def wait(self) -> list[int]:
        """See GenerationBatchResult."""
        return self.future.result()


class CpuForwardStream:
    """One worker thread. Right but weak as overlap: torch calls hold the GIL in between, so little Python hides."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def submit(self, batch: ModelWorkerBatch) -> CpuResult:
        """See ForwardStream."""
        return CpuResult(self._worker.submit(self._forward, batch))

    def close(self) -> None:
        """See ForwardStream."""
        self._worker.shutdown()

    def _forward(self, batch: ModelWorkerBatch) -> list[int]:
        tokens: list[int] = self._runner.forward(batch).tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class CudaResult:
    """`copy_done` of a forward on the CUDA stream; `batch` keeps its host arrays alive until then."""

    host_tokens_S: torch.Tensor
    copy_done: torch.cuda.Event
    batch: ModelWorkerBatch

    def wait(self) -> list[int]:
        """See GenerationBatchResult."""
        self.copy_done.synchronize()
        tokens: list[int] = self.host_tokens_S.tolist()
        return tokens


class CudaForwardStream:
    """A CUDA stream: `submit` queues the kernels from the calling thread and returns before they have run."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]

    def submit(self, batch: ModelWorkerBatch) -> CudaResult:
        """See ForwardStream."""
        with torch.cuda.stream(self._stream):
            tokens_S = self._runner.forward(batch)
            host_S = torch.empty(tokens_S.shape, dtype=tokens_S.dtype, pin_memory=True)
            host_S.copy_(tokens_S, non_blocking=True)
            copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copy_done.record(self._stream)
        return CudaResult(host_S, copy_done, batch)

    def close(self) -> None:
        """See ForwardStream."""
        self._stream.synchronize()


def make_forward_stream(runner: ModelRunner) -> ForwardStream:
    """The stream for the runner's device."""
    return CudaForwardStream(runner) if runner.device.type == "cuda" else CpuForwardStream(runner)
