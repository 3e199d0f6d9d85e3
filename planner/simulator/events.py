"""Virtual time: one heap of events for the whole simulation, and a clock that a node may run ahead of it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Runs events in order of time, those of one time in the order in which they were added. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        """The time now, for parts that take a Clock."""
        return self.now

    def at(self, time: float, run: Callable[..., object], *args: Any) -> None:
        """Run `run(*args)` at `time`, which is not in the past."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), run, args))

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is left, or `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, run, args = heapq.heappop(heap)
            run(*args)
        if until != float("inf"):
            self.now = max(self.now, until)


class NodeClock:
    """The time of one node's scheduler thread.

    A step is executed in one go when it begins, but it may wait for a forward in the middle: what it does after
    that happens later. So the thread's clock runs ahead of the loop's for the rest of the step; whatever others
    do to the node meanwhile is heard by its next step, as on a thread that waits.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._ahead = 0.0
        self.in_step = False

    def __call__(self) -> float:
        """Now: of the scheduler thread within a step, else of the loop."""
        return max(self._ahead, self._loop.now) if self.in_step else self._loop.now

    @property
    def free_at(self) -> float:
        """When the scheduler thread has finished its last step."""
        return self._ahead

    def wait_until(self, time: float) -> None:
        """The scheduler thread blocks."""
        assert self.in_step
        self._ahead = max(self(), time)
