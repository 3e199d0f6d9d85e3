"""The figures of nodes for Prometheus, from their Load: SGLang's names where it has the figure, else Baton's own.

A router exports those of all its nodes, and a node its own at its HTTP port, with the same names and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared.protocol.messages import Load, Role

_Figure = tuple[str, str, str | Callable[[Load], float]]
"""Name, help text, and the field of a Load or a function of it."""


class LoadCollector(Collector):
    """Reads the latest loads at each scrape, so that a node that is gone leaves no stale figure.

    `loads` are role, node id and load of each node. The labels are `model_name`, `role` and `node`.
    """

    def __init__(
        self, model_name: Callable[[], str], loads: Callable[[], Iterable[tuple[Role, str, Load]]]
    ) -> None:
        self._model_name = model_name
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        """Every figure of every node. It is called on the thread of the scrape."""
        loads = list(self._loads())
        for kind, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, description, figure in figures:
                family = kind(name, description, labels=("model_name", "role", "node"))
                for role, node_id, load in loads:
                    value = getattr(load, figure) if isinstance(figure, str) else figure(load)
                    family.add_metric((self._model_name(), role.value, node_id), value)
                yield family


def _usage(load: Load) -> float:
    in_use = _share_in_use(load.num_free_pages + load.num_evictable_pages, load.num_pages)
    return max(in_use, _share_in_use(load.num_available_window_pages, load.num_window_pages))


def _share_in_use(num_available: int, num_pages: int) -> float:
    return 1 - num_available / num_pages if num_pages else 0.0


def _hit_rate(load: Load) -> float:
    return load.num_cached_tokens / load.num_prompt_tokens if load.num_prompt_tokens else 0.0


_GAUGES: Sequence[_Figure] = (
    ("sglang:num_running_reqs", "Requests in the running batch.", "num_running"),
    ("sglang:num_queue_reqs", "Requests in the waiting queue.", "num_waiting"),
    (
        "baton:num_queued_tokens",
        "Prompt tokens that the node is to compute, and has not yet.",
        "num_queued_tokens",
    ),
    ("baton:prefill_tokens_per_second", "What prefills usually reach.", "prefill_tokens_per_s"),
    (
        "baton:kv_transfer_bytes_per_second",
        "What transfers of at least 1 MiB of KV that ended well reach lately; 0 until there was one.",
        "kv_bytes_per_s",
    ),
    (
        "baton:reserve_wait_seconds",
        "How long the oldest request without a reservation of pages has waited.",
        "reserve_wait_s",
    ),
    (
        "sglang:token_usage",
        "Share of KV pages, or of window pages if it is larger, that running requests hold.",
        _usage,
    ),
    ("sglang:cache_hit_rate", "Share of prompt tokens found in the RadixCache.", _hit_rate),
    ("sglang:gen_throughput", "Output tokens a second.", "gen_throughput"),
    ("baton:num_transferring_reqs", "Requests whose KV is moving.", "num_transferring"),
    (
        "baton:num_bootstrapping_reqs",
        "Requests that wait for the other node of their pair.",
        "num_bootstrapping",
    ),
    ("baton:num_pages", "KV pages of the pool.", "num_pages"),
    ("baton:num_free_pages", "KV pages that are free.", "num_free_pages"),
    ("baton:num_evictable_pages", "KV pages only the RadixCache holds.", "num_evictable_pages"),
    ("baton:num_held_pages", "KV pages held for a transfer.", "num_held_pages"),
    ("baton:num_window_pages", "KV pages of layers with sliding windows.", "num_window_pages"),
    (
        "baton:num_available_window_pages",
        "KV pages of layers with sliding windows that no request sees.",
        "num_available_window_pages",
    ),
    ("baton:num_retracted_reqs", "Requests that gave their KV back and wait.", "num_retracted"),
    ("baton:num_host_pages", "Pages of host memory for the KV of retracted requests.", "num_host_pages"),
    ("baton:num_free_host_pages", "Host pages that are free.", "num_free_host_pages"),
    ("baton:links_up", "Links to peers that can move KV.", "num_links"),
)
_COUNTERS: Sequence[_Figure] = (
    ("baton:retractions", "Requests that gave their KV back.", "num_retractions"),
    (
        "baton:retractions_host",
        "Retracted requests whose KV was copied to host memory.",
        "num_retractions_host",
    ),
    (
        "baton:retractions_recompute",
        "Retracted requests whose KV was dropped, to be prefilled again.",
        "num_retractions_recompute",
    ),
    (
        "baton:jump_forward_tokens",
        "Output tokens that a grammar forced, so that they were not sampled.",
        "num_jumped_tokens",
    ),
    (
        "baton:retraction_waits",
        "Decode steps that a request sat out, keeping its KV.",
        "num_retraction_waits",
    ),
    ("baton:node_prompt_tokens", "Tokens of the prompts that the node has begun.", "num_prompt_tokens"),
    ("baton:node_cached_tokens", "Prompt tokens that the node had in its RadixCache.", "num_cached_tokens"),
    (
        "baton:node_fetched_tokens",
        "Prompt tokens that another node has lent to the RadixCache of this one.",
        "num_fetched_tokens",
    ),
    (
        "baton:node_ahead_tokens",
        "Prompt tokens that the node has computed ahead of the reservation of their request.",
        "num_ahead_tokens",
    ),
    (
        "baton:node_ahead_evicted_tokens",
        "Tokens computed ahead that were evicted before their request had its reservation or ended.",
        "num_ahead_evicted_tokens",
    ),
    ("baton:node_generated_tokens", "Output tokens that the node has generated.", "num_generated_tokens"),
    ("baton:prefill_busy_seconds", "Time in which forwards with prompt tokens ran.", "prefill_busy_s"),
    (
        "baton:kv_transfer_bytes",
        "KV that the node has sent, and KV that it has received in transfers that ended well.",
        "kv_bytes_transferred",
    ),
    (
        "baton:kv_transfer_busy_seconds",
        "Time in which the pages of these transfers were on their way; those of several at a time add up.",
        "kv_transfer_s",
    ),
)
