"""Decides when a node that is silent or makes no progress is dead."""

from __future__ import annotations

from shared.protocol.heartbeat import Heartbeat
from shared.protocol.messages import Load


class Liveness:
    """Watches the pongs of one node.

    A node is dead when it is silent for `timeout_s`, or when the progress counter in its pongs has stood still for
    that long. An idle loop counts its turns there, and a long prefill chunk its layers.
    """

    def __init__(self, now: float, *, timeout_s: float, interval_s: float) -> None:
        self._heartbeat = Heartbeat(interval_s, timeout_s, now)
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._progress = -1
        self._stuck = False
        """True if the latest pong since the last ping told no progress."""
        self._num_stuck = 0
        """Pings in a row that such a pong followed. Time does not count, since this process may have been stopped.
        Pongs do not count, since a scrape of /metrics asks for one, and a node sends one when a link comes or goes.
        """

    def pong(self, now: float, load: Load) -> None:
        """Take the load of a Pong, whether it was asked for or not."""
        self._heartbeat.heard(now)
        self._stuck = load.progress == self._progress
        self._progress = load.progress
        if not self._stuck:
            self._num_stuck = 0

    def is_silent(self, now: float) -> bool:
        """Whether half of `timeout_s` has passed without a pong."""
        return self._heartbeat.silence(now) >= self._timeout_s / 2

    def tick(self, now: float) -> str | None:
        """Called with every ping. Returns why the node is dead, or None."""
        if self._heartbeat.silent(now):
            return f"no answer for {self._heartbeat.silence(now):.1f} s"
        self._heartbeat.pinged(now)
        self._num_stuck += self._stuck
        self._stuck = False
        if self._num_stuck * self._interval_s >= self._timeout_s:
            return f"no progress for {self._num_stuck * self._interval_s:.1f} s"
        return None
