"""Measuring several things in turn, so that a busy moment of the machine falls on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

LEAST, MOST = 3, 15
ABOUT_S = 3.0


def in_turn(measures: Sequence[Callable[[], float]], *, about_s: float = ABOUT_S) -> list[list[float]]:
    """What each of `measures` returned, over LEAST to MOST rounds of about `about_s` seconds together.

    In each round all take their turn. A round before them is for warming up, and not counted.
    """
    for measure in measures:
        measure()
    seen: list[list[float]] = [[] for _ in measures]
    begun = time.perf_counter()
    while len(seen[0]) < LEAST or (len(seen[0]) < MOST and time.perf_counter() - begun < about_s):
        for values, measure in zip(seen, measures, strict=True):
            values.append(measure())
    return seen
