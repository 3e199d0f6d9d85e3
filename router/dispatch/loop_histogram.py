"""A histogram that is cheap enough to observe every token."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


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
