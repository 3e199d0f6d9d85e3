"""Metrics of several workers in one answer: each worker's own figures with a `worker` label, those of nodes once.

A label, and not a sum: a worker that starts again begins at zero, and a counter that falls would look to Prometheus
as if everything had happened anew. `sum` and `histogram_quantile` over the label give the router's figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.bus.worker_messages import Family, Sample


def packed(metrics: Iterable[Metric]) -> tuple[Family, ...]:
    """As it is sent to another worker."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple(Sample(s.name, dict(s.labels), s.value) for s in metric.samples),
        )
        for metric in metrics
    )


def labelled_text(families_of: Mapping[str, Sequence[Family]], missing: Iterable[str]) -> bytes:
    """Prometheus' text format of all workers; those that are `missing` are told by `baton:router_worker_up`."""
    up = GaugeMetricFamily("baton:router_worker_up", "1 if the worker answered.", labels=("worker",))
    for name, value in sorted([(name, 1) for name in families_of] + [(name, 0) for name in missing]):
        up.add_metric((name,), value)
    merged: dict[str, Metric] = {}
    for worker, families in sorted(families_of.items()):
        for family in families:
            metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                metric.add_sample(sample.name, {**sample.labels, "worker": worker}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Collected([up, *merged.values()]))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
