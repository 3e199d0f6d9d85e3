"""Streams of a device, and the events that order their work.

Work that is queued on a stream runs behind all that was queued there before. Two streams run side by side: only an
event orders them, for the streams or for the host. Forwards, copies of pages and links order their work by these
protocols, so the tests run the same code over streams that run as early or as late as the events allow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

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
