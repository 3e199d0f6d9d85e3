"""The sequences that wait for their first token, on their way to a node or in one of its queues."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

from shared.timeline import Clock

WINDOW_S = 30.0
"""The rate is measured over so many seconds: longer than a step, and shorter than a change of load."""
_BUCKET_S = 1.0

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore a longer time, and retry sooner."""


@dataclass
class _Bucket:
    since: float
    num_served: int


class FirstTokenQueue:
    """The waiting sequences by rid, and the rate at which they are served. A second join or leave has no effect."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, int | None] = {}
        self._num_of: Counter[int | None] = Counter()
        self._busy_since = 0.0
        self._served: deque[_Bucket] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def num_of(self, api_key: int | None) -> int:
        """The waiting sequences of one API key."""
        return self._num_of[api_key]

    def join(self, rid: str, api_key: int | None = None) -> None:
        """A sequence was dispatched, of the API key with this number if several share the fleet.

        The rate is measured anew whenever the queue has been empty.
        """
        if not self._waiting:
            self._busy_since = self._clock()
            self._served.clear()
        if rid not in self._waiting:
            self._waiting[rid] = api_key
            self._num_of[api_key] += 1

    def leave(self, rid: str, *, served: bool) -> None:
        """A sequence has its first token or finished without one (`served`), or it was aborted or has failed."""
        if rid not in self._waiting:
            return
        self._num_of[self._waiting.pop(rid)] -= 1
        if served:
            self._count(self._clock())

    def wait_s(self, num_queued: int) -> float:
        """How many seconds a sequence behind `num_queued` others will wait: num_queued / rate.

        The rate is measured over the last WINDOW_S seconds, or since the queue was last empty, whichever is shorter.
        Before the first sequence is served, the rate counts it as served now.
        """
        if not self._waiting:
            return 0.0
        now = self._clock()
        since = max(self._busy_since, now - WINDOW_S)
        num_served = sum(bucket.num_served for bucket in self._served if bucket.since >= since - _BUCKET_S)
        return num_queued * (now - since) / max(1, num_served)

    def _count(self, now: float) -> None:
        if not self._served or now - self._served[-1].since >= _BUCKET_S:
            self._served.append(_Bucket(now, 0))
        self._served[-1].num_served += 1
        while now - self._served[0].since > WINDOW_S + _BUCKET_S:
            self._served.popleft()


def retry_after_s(wait_s: float) -> int:
    """Whole seconds, within bounds, after which a request that was refused for a wait of `wait_s` may come again."""
    return max(math.ceil(min(wait_s, MAX_RETRY_AFTER_S)), MIN_RETRY_AFTER_S)
