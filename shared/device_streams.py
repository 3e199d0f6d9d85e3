"""Streams of a device, and the events that order their work.

Work that is queued on a stream runs behind all that was queued there before. Two streams run side by side: only an
event orders them, for the streams or for the host. Forwards, copies of pages and links order their work by these
protocols, so the tests run the same code over streams that run as early or as late as the events allow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

FORWARD_PRIORITY = -1
"""Of forwards, captured ones too. No other stream has it, so no link is ever handed the forward stream."""


class StreamEvent(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has come to this point."""
        ...

    def seconds_since(self, earlier: StreamEvent) -> float:
        """The device's time between two points that were passed. Both were recorded with `timed`."""
        ...


class DeviceStream(Protocol):
    """A queue of kernels and copies."""

    def use(self) -> AbstractContextManager[object]:
        """Queue here, for the length of a `with` block, what the calling thread launches."""
        ...

    def record(self, *, timed: bool = False) -> StreamEvent:
        """The point behind everything that is queued now."""
        ...

    def wait(self, event: StreamEvent) -> None:
        """Let nothing that is queued later run before `event`. Does not block the calling thread."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything that is queued now is done."""
        ...


class DeviceStreams(Protocol):
    """The streams of one device."""

    def new(self) -> DeviceStream:
        """Make a stream that no other stream waits for, the default stream included."""
        ...

    def current(self) -> DeviceStream:
        """The stream of the calling thread: the default stream, unless `use` has set another one."""
        ...


class GatherUnderWay(Protocol):
    """A copy of KV pages that a device works at. Until it was waited for, the pages and the copy belong to it."""

    def wait(self) -> int:
        """Block until it is done, and return its digest. Called once, by the thread that began it."""
        ...


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
