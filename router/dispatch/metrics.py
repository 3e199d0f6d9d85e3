"""The metrics for Prometheus: SGLang's names with a role label, so that its dashboards work, and Baton's own.

The dispatcher writes counters and histograms. Figures of nodes are read from their latest Pong at each scrape, so a
node that is gone leaves no stale figure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.dispatch.node import Node
from router.dispatch.running_req import Aborted, Cause, RunningReq
from router.dispatch.stages import StartStage, stages_of
from shared.protocol.load_metrics import LoadCollector
from shared.protocol.messages import Role
from shared.timeline import ReqStage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 1, 2, 5, 10)
_E2E_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 100, 200, 400, 800)
_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)

COUNTERS = {
    "sglang:prompt_tokens": "Prompt tokens of ended requests.",
    "sglang:generation_tokens": "Tokens sent to clients.",
    "sglang:cached_tokens": "Prompt tokens that were cached.",
    "sglang:num_requests": "Sequences started.",
    "sglang:num_aborted_requests": "Sequences aborted or abandoned.",
    "baton:num_failed_requests": "Sequences that nodes could not finish.",
    "baton:num_moves": "Sequences that moved to another decode node.",
    "baton:num_failed_moves": "Moves that ended with the sequence where it was.",
    "baton:num_inexact_continuations": (
        "Attempts behind output, on nodes of other numerics, or on nodes that are not exact."
    ),
    "baton:num_poison_requests": "Sequences ended because nodes crashed under them.",
    "baton:num_rejected_requests": "HTTP requests refused with a 429, since the queue was full.",
    "baton:num_late_requests": (
        "HTTP requests refused with a 429, since their first token would have come after --ttft-limit-s."
    ),
}
"""Those without labels of their own."""


class Metrics:
    """The metrics of one router, in a registry of their own, since tests have two routers in one process.

    `model_name` is called at each scrape, since a router may learn the model from its nodes. The counts and windows
    of recent traffic are for `/live`: counts only grow, and `roll` ends an interval of both windows.
    """

    def __init__(self, model_name: Callable[[], str]) -> None:
        self.num_rejected = self.num_tokens = 0
        self.ttft, self.itl = LatencyWindow(), LatencyWindow()
        self._model_name = model_name
        self._registry, self._own = CollectorRegistry(), CollectorRegistry()
        self._registry.register(_Labelled(self._own, model_name))
        self._counters = {
            name: Counter(name, description, registry=self._own) for name, description in COUNTERS.items()
        }
        self._failovers = Counter(
            "baton:num_failovers",
            "Attempts that were sent since a node had failed, or was lost or drained.",
            ("cause",),
            registry=self._own,
        )
        self._slow_starts = Counter(
            "baton:num_slow_starts",
            "Sequences whose first or second token was slow, by the stage longest beyond what it should cost.",
            ("slow_because",),
            registry=self._own,
        )
        for counter, values in ((self._failovers, Cause), (self._slow_starts, StartStage)):
            for value in values:
                counter.labels(value.value)  # there with a zero
        self._ttft = self._histogram(
            "sglang:time_to_first_token_seconds", "From dispatch to the first token.", _TTFT_BUCKETS
        )
        self._itl = self._histogram(
            "sglang:inter_token_latency_seconds", "Between two tokens of a sequence.", _ITL_BUCKETS
        )
        self._e2e = self._histogram(
            "sglang:e2e_request_latency_seconds", "From dispatch to the end.", _E2E_BUCKETS
        )
        self._kv_transfer = self._histogram(
            "baton:kv_transfer_seconds", "From reserved pages to KV that can be decoded.", _STAGE_BUCKETS
        )
        self._stages = Histogram(
            "baton:stage_duration_seconds",
            "How long a request stayed in a stage.",
            ("role", "stage"),
            buckets=_STAGE_BUCKETS,
            registry=self._own,
        )

    def watch(self, nodes: Callable[[], Iterable[Node]]) -> None:
        """Export the load of these nodes from now on."""
        self._registry.register(
            LoadCollector(
                self._model_name, lambda: [(node.role, node.ref.node_id, node.load) for node in nodes()]
            )
        )

    def watch_own(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Export a gauge of this router from now on."""
        Gauge(name, description, registry=self._own).set_function(value)

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of COUNTERS."""
        self._counters[name].inc(by)

    def rejected(self, *, late: bool = False) -> None:
        """Count an HTTP request that was refused since the queue was full, or its first token would come too late."""
        self.count("baton:num_late_requests" if late else "baton:num_rejected_requests")
        self.num_rejected += 1

    def roll(self) -> None:
        """End the interval of both windows of recent traffic."""
        self.ttft.roll()
        self.itl.roll()

    def failed_over(self, cause: Cause) -> None:
        """Count a sequence that is sent to other nodes."""
        self._failovers.labels(cause.value).inc()

    def export(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def started(self) -> None:
        """Count a sequence that was sent to its nodes, or aborted before."""
        self.count("sglang:num_requests")

    def first_tokens(self, num_new: int, ttft_s: float) -> None:
        """Count the first tokens of a sequence, which came `ttft_s` after its dispatch."""
        self._count_tokens(num_new)
        self._ttft.observe(ttft_s)
        self.ttft.observe(ttft_s)

    def later_tokens(self, gaps: Mapping[float, int]) -> None:
        """Count those of a step that were not the first of their sequences: so many for each latency in seconds."""
        self._count_tokens(sum(gaps.values()))
        for itl_s, num_new in gaps.items():
            self.itl.observe(itl_s, num_new)
            for _ in range(num_new):
                self._itl.observe(itl_s)

    def ended(self, req: RunningReq) -> None:
        """Count a sequence that has ended, with its latencies."""
        assert req.ended_at is not None
        if isinstance(req.finish, Aborted) or (req.error is not None and req.error.status == 499):
            self.count("sglang:num_aborted_requests")
        elif req.error is not None and (
            req.error.status >= 500 or req.error.status == HTTPStatus.REQUEST_TIMEOUT
        ):
            self.count(
                "baton:num_failed_requests"
            )  # other errors are the request's own, such as a wrong grammar
        self._e2e.observe(req.ended_at - req.started_at)
        self.count("sglang:prompt_tokens", req.prompt_len)
        self.count("sglang:cached_tokens", req.cached_tokens)
        if req.start is not None and req.start.slow_because is not None:
            self._slow_starts.labels(req.start.slow_because.value).inc()
        for part in stages_of(req):
            for stage, seconds in part.stays:
                self._stages.labels(part.node.role, stage).observe(seconds)
                if (part.node.role, stage) == (Role.DECODE, ReqStage.TRANSFERRING):
                    self._kv_transfer.observe(seconds)

    def _count_tokens(self, num_new: int) -> None:
        self.count("sglang:generation_tokens", num_new)
        self.num_tokens += num_new

    def _histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, description, buckets=buckets, registry=self._own)


class _Labelled(Collector):
    """The metrics of a registry with the labels that all of this router's have; none before the model is known."""

    def __init__(self, registry: CollectorRegistry, model_name: Callable[[], str]) -> None:
        self._registry = registry
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Every metric. A `role` of its own, that of a node, stays."""
        labels = {"model_name": self._model_name(), "role": "router"}
        for family in self._registry.collect() if labels["model_name"] else ():
            family.samples = [
                sample._replace(labels={**labels, **sample.labels}) for sample in family.samples
            ]
            yield family


# ------------------------------------------------------------------------------------- percentiles for /live
WINDOW_ROLLS = 10

_SHORTEST_S = 1e-5
_BUCKETS_PER_E = 16
"""A bucket is 6 % wider than the one before, so a percentile is off by 3 % at most."""
_NUM_BUCKETS = math.ceil(math.log(1e4 / _SHORTEST_S) * _BUCKETS_PER_E)


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
