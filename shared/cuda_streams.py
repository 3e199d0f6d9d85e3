"""The streams of a GPU (see `device_streams`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from shared.device_streams import StreamEvent


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """An event of CUDA."""

    event: torch.cuda.Event

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: StreamEvent) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000


@dataclass(frozen=True, slots=True)
class CudaStream:
    """A stream of CUDA."""

    stream: torch.cuda.Stream
    sleeps: bool = False
    """True if a thread that waits for an event sleeps; else it spins, which takes a core and 20 to 50 us less."""

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def record(self, *, timed: bool = False) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=timed, blocking=self.sleeps)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()


@dataclass(frozen=True, slots=True)
class CudaStreams:
    """The streams of one GPU."""

    device: torch.device
    sleeps: bool = False
    """How threads wait for events of these streams: see `CudaStream`."""
    priority: int = 0
    """Of new streams. torch hands out the 32 streams of each priority in turn, so the 33rd is the first one again."""

    def new(self) -> CudaStream:
        stream = torch.cuda.Stream(self.device, self.priority)  # type: ignore[no-untyped-call]
        return CudaStream(stream, self.sleeps)

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.device), self.sleeps)


def synchronize(device: torch.device) -> None:
    """Wait for everything that was queued on a GPU. A CPU has nothing queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
