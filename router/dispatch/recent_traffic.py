"""The traffic of the last seconds: tokens, and percentiles of TTFT and ITL."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import repeat

WINDOW_ROLLS = 10

_SHORTEST_S = 1e-5
_BUCKETS_PER_E = 16
"""A bucket is 6 % wider than the one before, so a percentile is off by 3 % at most."""
_NUM_BUCKETS = math.ceil(math.log(1e4 / _SHORTEST_S) * _BUCKETS_PER_E)


class LatencyWindow:
    """A histogram with logarithmic buckets over a sliding window. `observe` is one logarithm and one addition."""

    def __init__(self) -> None:
        self._open = _empty()
        self._closed: deque[list[int]] = deque(maxlen=WINDOW_ROLLS)

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` latencies of `seconds`."""
        at = int(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) * _BUCKETS_PER_E)
        self._open[min(at, _NUM_BUCKETS - 1)] += count

    def roll(self) -> None:
        """End an interval. Observations of more than WINDOW_ROLLS intervals ago are forgotten."""
        self._closed.append(self._open)
        self._open = _empty()

    def percentiles(self, shares: Sequence[float]) -> tuple[float, ...] | None:
        """The latency in seconds that each of `shares` (ascending) of the observations stay within; None: no data."""
        counts = [sum(column) for column in zip(*self._closed, strict=True)]
        total = sum(counts)
        if not total:
            return None
        found: list[float] = []
        seen = 0
        for at, count in enumerate(counts):
            seen += count
            while len(found) < len(shares) and seen >= shares[len(found)] * total:
                found.append(round(_SHORTEST_S * math.exp((at + 0.5) / _BUCKETS_PER_E), 6))
        return tuple(found)


class RecentTraffic:
    """`Metrics` writes it and `LiveState` reads it once a second. Counts only grow."""

    def __init__(self) -> None:
        self.num_reqs = 0
        self.num_rejected = 0
        self.num_tokens = 0
        self.ttft = LatencyWindow()
        self.itl = LatencyWindow()

    def started(self) -> None:
        """Count a sequence that was sent to its nodes."""
        self.num_reqs += 1

    def rejected(self) -> None:
        """Count an HTTP request that was refused with a 429."""
        self.num_rejected += 1

    def first_tokens(self, num_new: int, ttft_s: float) -> None:
        """Count the first tokens of a sequence."""
        self.num_tokens += num_new
        self.ttft.observe(ttft_s)

    def more_tokens(self, num_new: int, itl_s: float) -> None:
        """Count further tokens of a sequence; `itl_s` is the time between two of them."""
        self.num_tokens += num_new
        self.itl.observe(itl_s, num_new)

    def roll(self) -> None:
        """End the interval of both windows."""
        self.ttft.roll()
        self.itl.roll()


def _empty() -> list[int]:
    return list(repeat(0, _NUM_BUCKETS))
