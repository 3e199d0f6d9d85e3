"""Forwards on a CUDA stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from shared.device_streams import DeviceStreams, StreamEvent
from shared.engine.model_runner import Forwarded, ModelRunner, SampledTensors
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import VocabMask
from shared.kvcache.allocator import PageCopy
from shared.kvcache.host_pool import HostKVPool
from shared.scheduling.commit import Sampled

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CudaPending(Generic[T]):
    """Work of the CUDA stream, and what makes its result on the host once it is done."""

    done: StreamEvent
    result: Callable[[], T]

    def wait(self) -> T:
        """Block until the stream has come to `done`."""
        self.done.synchronize()
        return self.result()


class CudaForwardStream:
    """A CUDA stream: kernels are queued from the calling thread, which goes on before they have run."""

    def __init__(self, runner: ModelRunner, host_pool: HostKVPool | None, streams: DeviceStreams) -> None:
        self._runner = runner
        self._host_pool = host_pool
        self._stream = streams.new()

    def submit(self, batch: ModelWorkerBatch) -> Forwarded:
        """Queue the kernels of a forward."""
        with self._stream.use():
            return self._runner.forward(batch)

    def sample(
        self, forwarded: Forwarded, vocab_mask: VocabMask[np.ndarray] | None = None
    ) -> CudaPending[Sampled]:
        """Queue the kernels of its sampling, and the copy of what they draw to pinned memory."""
        with self._stream.use():
            on_host: SampledTensors = self._runner.sample(forwarded, vocab_mask).map(_start_copy_to_host)
        return CudaPending(self._stream.record(), on_host.as_values)

    def copy(self, pages: PageCopy) -> CudaPending[float]:
        """Queue a copy between two events."""
        assert self._host_pool is not None, "no host pages, no copies"
        started = self._stream.record(timed=True)
        with self._stream.use():
            self._host_pool.copy(pages)
        done = self._stream.record(timed=True)
        return CudaPending(done, lambda: done.seconds_since(started))

    def fence(self) -> CudaPending[None]:
        """An event recorded now."""
        return CudaPending(self._stream.record(), lambda: None)

    def close(self) -> None:
        """Wait for the stream, and close the runner."""
        self._stream.synchronize()
        self._runner.close()


def _start_copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
