"""When a node that says nothing, or that no longer gets anywhere, counts as dead."""

from __future__ import annotations

from shared.protocol.messages import Load


class Liveness:
    """Watches the pongs of one node.

    A node is dead after `timeout_s` without a pong, or when it has said for that long that it is busy while its
    progress counter stood still. A long prefill chunk is neither: pongs are answered and progress counts layers.
    Time in which this process itself did not run (it was stopped, the machine slept) is not held against the node.
    """

    def __init__(self, now: float, *, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._last_tick = now
        self._last_pong = now
        self._last_progress = now
        self._progress = -1

    def pong(self, now: float, load: Load) -> None:
        """The node has answered."""
        self._last_pong = now
        if load.progress != self._progress or not load.busy:
            self._progress = load.progress
            self._last_progress = now

    def tick(self, now: float) -> str | None:
        """To be called every `interval_s`; returns why the node is dead, or None."""
        asleep_s = now - self._last_tick - self._interval_s
        if asleep_s > self._interval_s:
            self._last_pong += asleep_s
            self._last_progress += asleep_s
        self._last_tick = now
        if now - self._last_pong > self._timeout_s:
            return f"no answer for {now - self._last_pong:.1f} s"
        if now - self._last_progress > self._timeout_s:
            return f"busy without progress for {now - self._last_progress:.1f} s"
        return None
