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


def seconds_of(
    run: Callable[[int], Any],
    device: str,
    *,
    repeats: int = 10,
    warm_up: int = 3,
) -> float:
    """The median time of `run(i)`, which queues work and does not wait. `i` chooses buffers that no cache holds.

    The times are between events of the current stream, queued behind a pause. In a dry run it is the time of
    one call.
    """
    if device == "cpu":
        return _host_seconds(run)
    for i in range(warm_up):
        run(i)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    events[0].record()
    for i in range(repeats):
        run(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))


def _host_seconds(run: Callable[[int], Any]) -> float:
    begun = time.perf_counter()
    run(0)
    return time.perf_counter() - begun
