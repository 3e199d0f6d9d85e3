"""The events of `/live`, which the page draws. Times are seconds, rates are per second, pages are KV
pages.

The first event of a feed has the samples of the last ten minutes, and each later event has the new ones.
"""

from __future__ import annotations

import msgspec

from router.http.answer import Answer

SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES = 600
PERCENTILES = (0.5, 0.9, 0.99)


class RouterNow(Answer, frozen=True, kw_only=True):
    """The router that answers. `context_length` is None while no node has said which model it serves.

    `worker` is the router's name if it is one of several (--router-workers). Figures of clients are this router's
    own; figures of nodes count the requests of all routers.
    """

    worker: str | None
    status: str
    reason: str
    model: str
    version: str
    has_chat_template: bool
    context_length: int | None
    uptime_s: float
    percentile_window_s: float


class NodeNow(Answer, frozen=True, kw_only=True):
    """A node. `state` is loading, dialling, live, draining, refused or gone; `reason` says why it is not live.

    Held pages belong to requests and transfers. Cached pages belong only to the RadixCache, which evicts them when
    they are needed. `prompt_tokens_per_s` counts computed tokens without cached ones, `tokens_per_s` generated ones.
    `links` counts `num_links` by transport, and `links_words` says what they measured and why none is better.
    """

    node_id: str
    role: str
    address: str
    state: str
    reason: str = ""
    loaded: float | None = None
    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_bootstrapping_reqs: int = 0
    num_transferring_reqs: int = 0
    num_retracted_reqs: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_held_pages: int = 0
    num_links: int = 0
    links: dict[str, int] = msgspec.field(default_factory=dict)
    links_words: list[str] = msgspec.field(default_factory=list)
    prompt_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0
    kv_bytes_per_s: float = 0.0


class FleetSample(Answer, frozen=True, kw_only=True):
    """The connected nodes of one role, added up. KV bytes count where they arrive and where they leave."""

    num_nodes: int
    num_running_reqs: int
    num_queue_reqs: int
    num_transferring_reqs: int
    tokens_per_s: float
    kv_bytes_per_s: float
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int


class Sample(Answer, frozen=True, kw_only=True):
    """One second. Percentiles (see PERCENTILES) are over the last few, and None if nothing was observed in them.

    Of this router's sequences, `num_running_reqs` stream and `num_queue_reqs` wait for their first token.
    `rejected_per_s` counts HTTP requests that were refused with a 429.
    """

    time: float
    num_running_reqs: int
    num_queue_reqs: int
    tokens_per_s: float
    reqs_per_s: float
    rejected_per_s: float
    ttft_s: tuple[float, ...] | None
    itl_s: tuple[float, ...] | None
    prefill: FleetSample
    decode: FleetSample


class LiveEvent(Answer, frozen=True, kw_only=True):
    """One event of the feed."""

    router: RouterNow
    nodes: list[NodeNow]
    samples: list[Sample]
