"""The events of `/live`, which the page draws. Times are seconds, rates are per second, pages are KV
pages.

The first event of a feed has the samples of the last ten minutes, and each later event has the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from router.http.answer import Answer

SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES = 600
PERCENTILES = (0.5, 0.9, 0.99)
NO_BOTTLENECK = "no bottleneck"


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
    `prefill_busy` is the share of time in which the node computed prompts, and a forward counts when it ends.
    `kv_under_way` is the average number of transfers whose pages a decode node waited for.
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
    prefill_busy: float = 0.0
    kv_under_way: float = 0.0


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
    num_bootstrapping_reqs: int = 0
    prefill_busy: float = 0.0
    kv_under_way: float = 0.0


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
    """One event of the feed.

    `verdict` is one sentence: which part of the fleets is the bottleneck.
    """

    router: RouterNow
    nodes: list[NodeNow]
    samples: list[Sample]
    verdict: str = ""


_WINDOW = 10
"""Samples that a verdict is about, one a second."""

_MIN_WAITING = 1.0
"""Requests that wait on average. Fewer are those that come and go."""
_MIN_BUSY = 0.5
_FULL = 0.8
"""Of the KV pages of decode nodes. With fewer in use, requests wait for a place in the running batch."""
_MIN_CHANGE = 0.25
"""A queue grows if it is so much longer in the second half of the window than in the first."""


class _Suspect(NamedTuple):
    num_waiting: float
    sentence: str


def fleet_verdict(samples: Sequence[Sample]) -> str:
    """The sentence about the latest samples; empty while there are none."""
    recent = samples[-_WINDOW:]
    if not recent:
        return ""
    suspects = [suspect for find in (_prefill, _decode, _transfer) if (suspect := find(recent)) is not None]
    return max(suspects).sentence if suspects else NO_BOTTLENECK


def _prefill(recent: Sequence[Sample]) -> _Suspect | None:
    # Those that are bootstrapping wait for a decode node.
    waiting = [sample.prefill.num_queue_reqs - sample.prefill.num_bootstrapping_reqs for sample in recent]
    busy = _share(recent, lambda s: s.prefill, lambda fleet: (fleet.prefill_busy, fleet.num_nodes))
    if _mean(waiting) < _MIN_WAITING or busy < _MIN_BUSY:
        return None
    busy = min(1.0, busy)  # a forward counts in the sample in which it ended
    return _Suspect(_mean(waiting), f"prefill is the bottleneck: {_percent(busy)} busy, {_queue(waiting)}")


def _decode(recent: Sequence[Sample]) -> _Suspect | None:
    waiting = [sample.decode.num_bootstrapping_reqs for sample in recent]
    if _mean(waiting) < _MIN_WAITING:
        return None
    used = _share(recent, lambda s: s.decode, lambda fleet: (fleet.num_held_pages, fleet.num_pages))
    why = f"{_percent(used)} of its KV pages in use" if used >= _FULL else "every place in its batches taken"
    return _Suspect(_mean(waiting), f"decode is the bottleneck: {why}, {_queue(waiting)}")


def _transfer(recent: Sequence[Sample]) -> _Suspect | None:
    under_way = [sample.decode.kv_under_way for sample in recent]
    waiting = [max(0.0, sample.decode.kv_under_way - sample.decode.num_nodes) for sample in recent]
    if _mean(waiting) < _MIN_WAITING:
        return None
    rate = _mean([sample.decode.kv_bytes_per_s for sample in recent])
    return _Suspect(
        _mean(waiting),
        f"transfer is the bottleneck: {_mean(under_way):.0f} transfers under way at once to "
        f"{recent[-1].decode.num_nodes} decode nodes, at {rate / 1e9:.2g} GB/s, {_trend(under_way)}",
    )


def _share(
    recent: Sequence[Sample],
    fleet: Callable[[Sample], FleetSample],
    part_and_whole: Callable[[FleetSample], tuple[float, float]],
) -> float:
    parts = [part_and_whole(fleet(sample)) for sample in recent]
    whole = sum(whole for _, whole in parts)
    return sum(part for part, _ in parts) / whole if whole else 0.0


def _queue(waiting: Sequence[float]) -> str:
    return f"queue {_trend(waiting)} ({waiting[-1]:.0f} waiting)"


def _trend(counts: Sequence[float]) -> str:
    half = len(counts) // 2
    before, after = _mean(counts[:half]), _mean(counts[half:])
    if not half or abs(after - before) < _MIN_CHANGE * max(before, _MIN_WAITING):
        return "steady"
    return "growing" if after > before else "shrinking"


def _mean(counts: Sequence[float]) -> float:
    return sum(counts) / len(counts) if counts else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
