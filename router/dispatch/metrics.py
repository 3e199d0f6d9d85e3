"""What Prometheus scrapes: SGLang's names with a role label, so that its dashboards work, and Baton's own.

Counters and histograms are fed by the dispatcher. Gauges of nodes are read from their latest Pong when they are
asked for, so a node that is gone leaves no stale figure behind.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.dispatch.loop_histogram import LoopHistogram
from router.dispatch.recent_traffic import RecentTraffic
from router.dispatch.running_req import Aborted, Node, RunningReq
from shared.protocol.messages import Load, Role, Stamp
from shared.timeline import ReqStage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 1, 2, 5, 10)
_E2E_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 100, 200, 400, 800)
_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)

F = TypeVar("F", Counter, Gauge, Histogram)
NodeGauge = tuple[str, str, Callable[[Load], float]]

_GAUGES: Sequence[NodeGauge] = (
    ("sglang:num_running_reqs", "Requests in the running batch.", lambda load: load.num_running),
    ("sglang:num_queue_reqs", "Requests in the waiting queue.", lambda load: load.num_waiting),
    ("sglang:token_usage", "Share of KV pages that running requests hold.", lambda load: _usage(load)),
    (
        "sglang:cache_hit_rate",
        "Share of prompt tokens found in the RadixCache.",
        lambda load: _hit_rate(load),
    ),
    ("sglang:gen_throughput", "Output tokens a second.", lambda load: load.gen_throughput),
    ("baton:num_transferring_reqs", "Requests whose KV is moving.", lambda load: load.num_transferring),
    (
        "baton:num_bootstrapping_reqs",
        "Requests that wait for the other node of their pair.",
        lambda load: load.num_bootstrapping,
    ),
    ("baton:num_pages", "KV pages of the pool.", lambda load: load.num_pages),
    ("baton:num_free_pages", "KV pages that are free.", lambda load: load.num_free_pages),
    (
        "baton:num_evictable_pages",
        "KV pages only the RadixCache holds.",
        lambda load: load.num_evictable_pages,
    ),
    ("baton:num_held_pages", "KV pages held for a transfer.", lambda load: load.num_held_pages),
    (
        "baton:num_retracted_reqs",
        "Requests that gave their KV back and wait.",
        lambda load: load.num_retracted,
    ),
    (
        "baton:num_host_pages",
        "Pages of host memory for the KV of retracted requests.",
        lambda load: load.num_host_pages,
    ),
    ("baton:num_free_host_pages", "Host pages that are free.", lambda load: load.num_free_host_pages),
    ("baton:links_up", "Links to peers that can move KV.", lambda load: load.num_links),
)
_COUNTERS: Sequence[NodeGauge] = (
    ("baton:retractions", "Requests that gave their KV back.", lambda load: load.num_retractions),
    (
        "baton:retractions_host",
        "Retracted requests whose KV was copied to host memory.",
        lambda load: load.num_retractions_host,
    ),
    (
        "baton:retractions_recompute",
        "Retracted requests whose KV was dropped, to be prefilled again.",
        lambda load: load.num_retractions_recompute,
    ),
    (
        "baton:jump_forward_tokens",
        "Output tokens that a grammar forced, so that they were not sampled.",
        lambda load: load.num_jumped_tokens,
    ),
    (
        "baton:retraction_waits",
        "Decode steps that a request sat out, keeping its KV.",
        lambda load: load.num_retraction_waits,
    ),
    ("baton:kv_transfer_bytes", "KV moved over links.", lambda load: load.kv_bytes_transferred),
    ("baton:kv_transfer_busy_seconds", "Time in which KV was moving.", lambda load: load.kv_transfer_s),
)


class Metrics:
    """A registry of its own: two routers in one process (tests) do not meet.

    `model_name` is asked for with each figure, since a router may learn from its nodes what it serves.
    """

    def __init__(self, model_name: Callable[[], str]) -> None:
        self.traffic = RecentTraffic()
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._children: dict[Counter | Gauge | Histogram, Counter | Gauge | Histogram] = {}
        self._prompt_tokens = self._counter("sglang:prompt_tokens", "Prompt tokens of ended requests.")
        self._generation_tokens = self._counter("sglang:generation_tokens", "Tokens sent to clients.")
        self._cached_tokens = self._counter("sglang:cached_tokens", "Prompt tokens that were cached.")
        self._requests = self._counter("sglang:num_requests", "Sequences started.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Sequences aborted or abandoned.")
        self._failed = self._counter("baton:num_failed_requests", "Sequences that nodes could not finish.")
        self._failovers = self._counter(
            "baton:num_failovers", "Sequences sent to other nodes, since the first could not go on."
        )
        self._rejected = self._counter(
            "baton:num_rejected_requests", "HTTP requests refused with a 429, since the queue was full."
        )
        self._own_gauges: list[tuple[Gauge, Callable[[], float]]] = []
        self._ttft = self._histogram(
            "sglang:time_to_first_token_seconds", "From dispatch to the first token.", _TTFT_BUCKETS
        )
        self._itl = LoopHistogram(
            "sglang:inter_token_latency_seconds",
            "Between two tokens of a sequence.",
            _ITL_BUCKETS,
            lambda: {"model_name": self._model_name(), "role": "router"},
        )
        self._registry.register(self._itl)
        self._e2e = self._histogram(
            "sglang:e2e_request_latency_seconds", "From dispatch to the end.", _E2E_BUCKETS
        )
        self._kv_transfer = self._histogram(
            "baton:kv_transfer_seconds", "From reserved pages to KV that can be decoded.", _STAGE_BUCKETS
        )
        self._families: tuple[Counter | Histogram, ...] = (
            *(self._prompt_tokens, self._generation_tokens, self._cached_tokens),
            *(self._requests, self._aborted, self._failed, self._failovers, self._rejected),
            *(self._ttft, self._e2e, self._kv_transfer),
        )
        self._stages = Histogram(
            "baton:stage_duration_seconds",
            "How long a request stayed in a stage.",
            ("model_name", "role", "stage"),
            buckets=_STAGE_BUCKETS,
            registry=self._registry,
        )

    def watch(self, nodes: Callable[[], Iterable[Node]]) -> None:
        """Export the load of these nodes from now on."""
        self._registry.register(_NodeCollector(nodes, self._model_name))

    def watch_own(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Export a gauge of this router from now on."""
        gauge = Gauge(name, description, ("model_name", "role"), registry=self._registry)
        self._own_gauges.append((gauge, value))

    def rejected(self) -> None:
        """An HTTP request was refused, because the queue was full."""
        self._own(self._rejected).inc()
        self.traffic.rejected()

    def failed_over(self) -> None:
        """A sequence was sent to other nodes."""
        self._own(self._failovers).inc()

    def export(self) -> bytes:
        """Everything, in Prometheus' text format; what has not happened yet is a zero, not absent."""
        if self._model_name():
            for family in self._families:
                family.labels(self._model_name(), "router")
            for gauge, value in self._own_gauges:
                self._own(gauge).set(value())
        return generate_latest(self._registry)

    def started(self, req: RunningReq) -> None:
        """A sequence was sent to its nodes, or aborted before."""
        self._own(self._requests).inc()
        self.traffic.started()

    def tokens(self, req: RunningReq, num_new: int, since: float | None, now: float) -> None:
        """`num_new` tokens came in order; `since` is when the one before them did."""
        if num_new == 0:
            return
        if since is None:
            self._own(self._ttft).observe(now - req.started_at)
            self.traffic.first_tokens(num_new, now - req.started_at)
        else:
            itl_s = (now - since) / num_new
            self._itl.observe(itl_s, num_new)
            self.traffic.more_tokens(num_new, itl_s)

    def generated(self, num_tokens: int) -> None:
        """A step of a node brought so many new tokens, of all its sequences together."""
        self._own(self._generation_tokens).inc(num_tokens)

    def ended(self, req: RunningReq) -> None:
        """A sequence is over, in whatever way."""
        assert req.ended_at is not None
        if isinstance(req.finish, Aborted) or (req.error is not None and req.error.status == 499):
            self._own(self._aborted).inc()
        elif req.error is not None and (
            req.error.status >= 500 or req.error.status == HTTPStatus.REQUEST_TIMEOUT
        ):
            self._own(self._failed).inc()  # what remains is wrong with the request, such as its grammar
        self._own(self._e2e).observe(req.ended_at - req.started_at)
        self._own(self._prompt_tokens).inc(req.prompt_len)
        self._own(self._cached_tokens).inc(req.cached_tokens)
        for role, stage, seconds in stage_durations(req.stamps):
            self._stages.labels(self._model_name(), role, stage).observe(seconds)
            if (role, stage) == (Role.DECODE, ReqStage.TRANSFERRING):
                self._own(self._kv_transfer).observe(seconds)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(name, description, ("model_name", "role"), registry=self._registry)

    def _histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, description, ("model_name", "role"), buckets=buckets, registry=self._registry)

    def _own(self, family: F) -> F:
        """The series of this router; looked up once, since `labels` is slow."""
        child = self._children.get(family)
        if child is None:
            child = family.labels(self._model_name(), "router")
            if self._model_name():  # it does not change any more
                self._children[family] = child
        return cast("F", child)


class _NodeCollector(Collector):
    def __init__(self, nodes: Callable[[], Iterable[Node]], model_name: Callable[[], str]) -> None:
        self._nodes = nodes
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        labels = ("model_name", "role", "node")
        nodes = list(self._nodes())
        for name, description, value in _GAUGES:
            gauge = GaugeMetricFamily(name, description, labels=labels)
            for node in nodes:
                gauge.add_metric(self._labels(node), value(node.load))
            yield gauge
        for name, description, value in _COUNTERS:
            counter = CounterMetricFamily(name, description, labels=labels)
            for node in nodes:
                counter.add_metric(self._labels(node), value(node.load))
            yield counter

    def _labels(self, node: Node) -> tuple[str, str, str]:
        return self._model_name(), node.role.value, node.ref.node_id


def stage_durations(stamps: Sequence[Stamp]) -> list[tuple[str, str, float]]:
    """Role, stage and how long it lasted there. Clocks of two nodes are never compared."""
    durations: list[tuple[str, str, float]] = []
    of_role: dict[str, list[Stamp]] = defaultdict(list)
    for stamp in stamps:
        of_role[stamp.role].append(stamp)
    for own in of_role.values():
        durations += [(a.role, a.stage, max(0.0, b.time - a.time)) for a, b in itertools.pairwise(own)]
    return durations


def _usage(load: Load) -> float:
    return 1 - (load.num_free_pages + load.num_evictable_pages) / load.num_pages if load.num_pages else 0.0


def _hit_rate(load: Load) -> float:
    return load.num_cached_tokens / load.num_prompt_tokens if load.num_prompt_tokens else 0.0
