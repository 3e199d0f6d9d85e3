"""Which part of the fleets holds requests up, in one sentence, from the samples of the last seconds.

The bottleneck is where most requests wait, if that part is also the busy one:

    prefill     requests wait on prefill nodes that compute prompts for at least half of the time
    decode      requests wait for pages or a place on decode nodes
    transfer    more transfers are under way than there are decode nodes, so that they share links
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.api.live_feed import NO_BOTTLENECK, FleetSample, Sample

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
