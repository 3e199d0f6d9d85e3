"""How long work takes on the GPU's own clock."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SLEEP_CYCLES = 60_000_000
"""About 30 ms of a GPU, in which the host queues the work that is timed: its launches are no part of the times."""
LONGEST_PAUSES = 32
"""No pause is so many times SLEEP_CYCLES. The host waits then for a full queue of the GPU, not for launches."""


def seconds_of(
    run: Callable[[int], Any],
    device: str,
    *,
    repeats: int = 10,
    warm_up: int = 3,
) -> float:
    """The median time of `run(i)`, which queues work and does not wait. `i` chooses buffers that no cache holds.

    The times are between events of the current stream, queued behind a pause, which is doubled until it outlasts the
    launches. Raises RuntimeError where no pause does. In a dry run it is the time of one call.
    """
    if device == "cpu":
        return _host_seconds(run)
    for i in range(warm_up):
        run(i)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    pauses = 1
    while pauses < LONGEST_PAUSES:
        torch.cuda.synchronize()
        torch.cuda._sleep(pauses * SLEEP_CYCLES)
        events[0].record()
        for i in range(repeats):
            run(i)
            events[i + 1].record()
        is_queued = not events[0].query()
        torch.cuda.synchronize()
        if is_queued:
            return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
        pauses *= 2
    raise RuntimeError(
        f"{repeats} launches of what is timed outlast a pause of {pauses // 2 * SLEEP_CYCLES} cycles"
    )


def _host_seconds(run: Callable[[int], Any]) -> float:
    begun = time.perf_counter()
    run(0)
    return time.perf_counter() - begun
