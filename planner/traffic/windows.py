"""Long traces by windows: parts that are drawn so that load and reuse are kept, and what they add up to.

The trace is cut into slots of equal length. Slots of like load form a stratum, of which some are drawn; slots with
far more load than usual are bursts, a stratum of their own. A window is a slot with what came before it (a warm-up,
long enough to fill the caches) and after it (so that its last requests are not alone). Only requests of the slot
count.

    draw_windows(requests) ──▶ each is simulated ──▶ parts by stratum and weight ──▶ planner.estimate: 95 % intervals

Intervals say how far other draws would differ. They do not know of a queue that grew for longer than a warm-up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.figures import arrival_seconds
from planner.traffic.trace import SimRequest, shared_tokens

BURST_RANGES = 1.5
"""A slot whose load is so many interquartile ranges above the upper quartile is a burst (Tukey's fence)."""
_PER_STRATUM = 3

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A part of a trace as a workload of its own, in order of arrival from 0 s on."""

    requests: tuple[SimRequest, ...]
    counted_from_s: float
    counted_until_s: float
    """Requests that arrive between the two count; those before are a warm-up, and those after keep the fleet busy."""
    trace_rate: float
    """Requests a second of the whole trace."""
    stratum: int
    num_reqs: int
    """Requests of all slots of the stratum, drawn or not. All windows of the stratum together stand for them."""
    is_warm: bool = True
    """False where the longest warm-up was too short to fill the caches, so that less reuse is seen than there is."""

    def counts(self, request: SimRequest) -> bool:
        """Whether a request is one of those that are measured."""
        return self.counted_from_s <= request.at_s < self.counted_until_s


def draw_windows(
    requests: Sequence[SimRequest],
    *,
    cache_tokens: int,
    num_windows: int = 12,
    window_s: float = 60.0,
    min_warmup_s: float = 30.0,
    max_warmup_s: float = 300.0,
    tail_s: float = 30.0,
    seed: int = 0,
) -> list[Window]:
    """Windows of `requests`, which are in order of arrival, or a single one of all where that is no more to simulate.

    `cache_tokens` is what all RadixCaches of the fleet hold together: what was last used before so many other tokens
    is in none of them, so a warm-up that reaches further back changes nothing. A queue needs `min_warmup_s` to be as
    it would be, however small the caches are.
    """
    start_s, seconds = requests[0].at_s, requests[-1].at_s - requests[0].at_s
    num_slots = max(1, round(seconds / window_s))
    slot_s = seconds / num_slots
    arrivals = np.array([request.at_s for request in requests])
    rate = _rate(requests)
    if not shared_tokens(requests):
        cache_tokens = 0  # there is nothing to find in a cache
    starts = np.searchsorted(arrivals, start_s + slot_s * np.arange(num_slots))
    sizes = np.diff(starts, append=len(requests))
    windows = []
    for at, (stratum, slots) in enumerate(_draw(_loads(requests, starts), num_windows, random.Random(seed))):
        for slot in slots:
            from_s = start_s + slot * slot_s
            until_s = from_s + slot_s if slot + 1 < num_slots else math.inf
            begin, is_warm = _warmup(requests, int(starts[slot]), cache_tokens, min_warmup_s, max_warmup_s)
            end = int(np.searchsorted(arrivals, until_s + tail_s))
            shift_s = requests[begin].at_s
            windows.append(
                Window(
                    requests=tuple(replace(one, at_s=one.at_s - shift_s) for one in requests[begin:end]),
                    counted_from_s=from_s - shift_s,
                    counted_until_s=until_s - shift_s,
                    trace_rate=rate,
                    stratum=at,
                    num_reqs=int(sizes[stratum].sum()),
                    is_warm=is_warm,
                )
            )
    if sum(len(window.requests) for window in windows) < len(requests):
        return windows
    return [whole_window(requests)]


def whole_window(requests: Sequence[SimRequest]) -> Window:
    """All requests as one window."""
    start_s = requests[0].at_s
    return Window(
        requests=tuple(replace(one, at_s=one.at_s - start_s) for one in requests),
        counted_from_s=0.0,
        counted_until_s=math.inf,
        trace_rate=_rate(requests),
        stratum=0,
        num_reqs=len(requests),
    )


def _rate(requests: Sequence[SimRequest]) -> float:
    return len(requests) / (arrival_seconds([request.at_s for request in requests]) or 1.0)


def _loads(requests: Sequence[SimRequest], starts: _Ints) -> _Floats:
    """The load of each slot: prompt tokens that no cache could have, and answers, each over its mean.

    Half of the load of the slot before is added, since its queue may be inherited.
    """
    seen: set[int] = set()
    tokens = np.zeros((2, len(starts)))
    slot = -1
    for index, request in enumerate(requests):
        while slot + 1 < len(starts) and index >= starts[slot + 1]:
            slot += 1
        tokens[0, slot] += request.block_tokens * sum(block not in seen for block in request.blocks)
        tokens[1, slot] += request.output_len
        seen.update(request.blocks)
    load: _Floats = (tokens / tokens.mean(axis=1, keepdims=True)).sum(axis=0)
    for at in range(1, len(load)):
        load[at] += load[at - 1] / 2
    return load


def _draw(load: _Floats, num_windows: int, rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """Strata and the slots drawn from each. All bursts are drawn, the heaviest ones up to half of the windows."""
    order = [int(slot) for slot in np.argsort(load, kind="stable")]
    lower, upper = np.quantile(load, (0.25, 0.75))
    num_bursts = min(num_windows // 2, int((load > upper + BURST_RANGES * (upper - lower)).sum()))
    usual, bursts = order[: len(order) - num_bursts], order[len(order) - num_bursts :]
    drawn, num_left = [(bursts, bursts)], num_windows - num_bursts
    num_strata = max(1, num_left // _PER_STRATUM)
    for at in range(num_strata):
        stratum = usual[at * len(usual) // num_strata : (at + 1) * len(usual) // num_strata]
        wanted = (at + 1) * num_left // num_strata - at * num_left // num_strata
        drawn.append((stratum, rng.sample(stratum, min(len(stratum), max(2, wanted)))))
    return [(stratum, slots) for stratum, slots in drawn if slots]


def _warmup(
    requests: Sequence[SimRequest], first: int, cache_tokens: int, min_s: float, max_s: float
) -> tuple[int, bool]:
    """From which request on the slot that begins with `first` is warmed up, and whether that fills the caches."""
    seen: set[int] = set()
    num_tokens, begin = 0, first
    until_s = requests[first].at_s
    while begin:
        request = requests[begin - 1]
        before_s = until_s - request.at_s
        if num_tokens >= cache_tokens and before_s > min_s:
            return begin, True
        if before_s > max_s:
            return begin, False
        num_tokens += request.output_len + request.block_tokens * sum(
            block not in seen for block in request.blocks
        )
        seen.update(request.blocks)
        begin -= 1
    return 0, True
