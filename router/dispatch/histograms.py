"""Two histograms that are cheap enough to observe every token."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

WINDOW_ROLLS = 10

_SHORTEST_S = 1e-5
_BUCKETS_PER_E = 16
"""A bucket is 6 % wider than the one before, so a percentile is off by 3 % at most."""
_NUM_BUCKETS = math.ceil(math.log(1e4 / _SHORTEST_S) * _BUCKETS_PER_E)


class LoopHistogram(Collector):
    """Runs on one event loop, so it has none of the locks of `prometheus_client.Histogram`.

    `bounds` are the upper ends of the buckets, in order. `labels` is called when the histogram is read.
    """

    def __init__(
        self, name: str, description: str, bounds: Sequence[float], labels: Callable[[], dict[str, str]]
    ) -> None:
        self._name = name
        self._description = description
        self._bounds = bounds
        self._labels = labels
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """The histogram with its labels, for Prometheus."""
        labels = self._labels()
        family = HistogramMetricFamily(self._name, self._description, labels=tuple(labels))
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        totals = itertools.accumulate(self._counts)
        family.add_metric(tuple(labels.values()), list(zip(ends, totals, strict=True)), self._sum)
        yield family


class LatencyWindow:
    """A histogram with logarithmic buckets over a sliding window. `observe` is one logarithm and one addition."""

    def __init__(self) -> None:
        self._open = [0] * _NUM_BUCKETS
        self._closed: deque[list[int]] = deque(maxlen=WINDOW_ROLLS)

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` latencies of `seconds`."""
        at = int(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) * _BUCKETS_PER_E)
        self._open[min(at, _NUM_BUCKETS - 1)] += count

    def roll(self) -> None:
        """End an interval. Observations of more than WINDOW_ROLLS intervals ago are forgotten."""
        self._closed.append(self._open)
        self._open = [0] * _NUM_BUCKETS

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
