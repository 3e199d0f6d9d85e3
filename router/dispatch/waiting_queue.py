"""The sequences that wait for their first token, on their way to a node or there, and how long that takes."""

from __future__ import annotations

import math
from collections import deque

from shared.timeline import Clock

WINDOW_S = 30.0
"""The rate is measured over so many seconds: longer than a step, and shorter than a change of load."""
_BUCKET_S = 1.0

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore a longer time, and retry sooner."""


class WaitingQueue:
    """A sequence joins when it is dispatched, and leaves with its first token or its end.

    A second join or leave has no effect. The queue also measures the rate at which sequences are served.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rids: set[str] = set()
        self._busy_since = 0.0
        self._served: deque[list[float]] = deque()
        """The start of each second in which sequences were served, and their number."""

    def __len__(self) -> int:
        return len(self._rids)

    def join(self, rid: str) -> None:
        """A sequence was dispatched. The rate is measured anew whenever the queue has been empty."""
        if not self._rids:
            self._busy_since = self._clock()
            self._served.clear()
        self._rids.add(rid)

    def leave(self, rid: str, *, served: bool) -> None:
        """A sequence has its first token or finished without one (`served`), or it was aborted or has failed."""
        if rid in self._rids:
            self._rids.remove(rid)
            if served:
                self._count(self._clock())

    def wait_s(self, num_queued: int) -> float:
        """How many seconds a sequence behind `num_queued` others will wait: num_queued / rate.

        The rate is measured over the last WINDOW_S seconds, or since the queue was last empty, whichever is shorter.
        Before the first sequence is served, the rate counts it as served now.
        """
        if not self._rids:
            return 0.0
        now = self._clock()
        since = max(self._busy_since, now - WINDOW_S)
        num_served = sum(num for began, num in self._served if began >= since - _BUCKET_S)
        return num_queued * (now - since) / max(1, num_served)

    def _count(self, now: float) -> None:
        if not self._served or now - self._served[-1][0] >= _BUCKET_S:
            self._served.append([now, 0])
        self._served[-1][1] += 1
        while now - self._served[0][0] > WINDOW_S + _BUCKET_S:
            self._served.popleft()


def retry_after_s(wait_s: float) -> int:
    """Whole seconds, within bounds, after which a request that was refused for a wait of `wait_s` may come again."""
    return max(math.ceil(min(wait_s, MAX_RETRY_AFTER_S)), MIN_RETRY_AFTER_S)
