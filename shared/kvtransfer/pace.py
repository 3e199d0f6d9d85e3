"""Whether a link still carries what its rehearsal has measured."""

from __future__ import annotations

from collections.abc import Callable

from shared import log
from shared.kvtransfer.link import LinkRate

WINDOW_S = 0.01
"""Chunks in a row are compared whenever their rehearsal would have taken so long. Less is noise of busy threads."""
TIMES_SLOWER = 4.0
NUM_WINDOWS = 5
"""A link is slow when it took TIMES_SLOWER as long in so many windows in a row, until it takes half of that."""


class Pace:
    """Of a receiving link, by `rate`. Durations are of `clock` (s). Used by the thread that steps the link's loop.

    Time counts while chunks are granted and have not come. Nothing is expected of a link that is idle.
    """

    def __init__(self, link: str, transport: str, rate: LinkRate, clock: Callable[[], float]) -> None:
        self._link = link
        self._transport = transport
        self._rate = rate
        self._clock = clock
        self._since = 0.0
        self._busy_s = 0.0
        self._expected_s = 0.0
        self._nbytes = 0
        self._num_slow = 0
        self._reported = False
        self.slow_gb_s = 0.0
        """What the last window came to, while the link is slow. Else 0. Other threads may read it."""

    def begins(self) -> None:
        """Chunks are granted on a link that was idle."""
        self._since = self._clock()
        self._busy_s, self._expected_s, self._nbytes = 0.0, self._rate.latency_ms / 1e3, 0

    def moved(self, nbytes: int) -> None:
        """A chunk of `nbytes` has come, or was given up in time."""
        now = self._clock()
        self._busy_s += now - self._since
        self._since = now
        self._nbytes += nbytes
        self._expected_s += nbytes / self._rate.gb_s / 1e9
        if self._expected_s >= WINDOW_S:
            self._compare()
            self._busy_s, self._expected_s, self._nbytes = 0.0, 0.0, 0

    def _compare(self) -> None:
        times = self._busy_s / self._expected_s
        self._num_slow = self._num_slow + 1 if times > TIMES_SLOWER else 0
        if self._num_slow >= NUM_WINDOWS or (self.slow_gb_s and times > TIMES_SLOWER / 2):
            self.slow_gb_s = self._nbytes / self._busy_s / 1e9
        else:
            self.slow_gb_s = 0.0
        if self.slow_gb_s and not self._reported:
            self._reported = True
            log.warn(
                "link_slow",
                link=self._link,
                transport=self._transport,
                gb_s=self.slow_gb_s,
                rehearsed_gb_s=self._rate.gb_s,
            )
