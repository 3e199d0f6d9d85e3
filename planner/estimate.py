"""Means over parts of the traffic, with intervals of 95 %, and differences on the same parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from planner.answer import Estimate

_T = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)
"""Student's t at 97.5 %, by degrees of freedom from 1 on. From 19 on it is taken for 2.05."""


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value. A single value has no interval that is known: it is taken for exact."""
    mean = fmean(values)
    freedom = len(values) - 1
    if freedom == 0:
        return Estimate(value=mean, low=mean, high=mean)
    half = t95(freedom) * stdev(values) / math.sqrt(len(values))
    return Estimate(value=mean, low=mean - half, high=mean + half)


def t95(freedom: int) -> float:
    """Half the width of an interval of 95 %, in standard errors, with at least one degree of freedom."""
    return _T[freedom - 1] if freedom <= len(_T) else 2.05


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The mean of ours - theirs, part by part: what both have in common, such as a burst of requests, cancels out."""
    return estimate([one - other for one, other in zip(ours, theirs, strict=True)])


def is_more_than_noise(one: Estimate) -> bool:
    """0 is not within it."""
    return one.low > 0 or one.high < 0


def crossing(points: Sequence[tuple[float, float]], bound: float) -> float | None:
    """Where y, over ascending positive x, falls below `bound` for the last time; between points, linear in log x.

    None if no point reaches it. The greatest x if the last point does.
    """
    for i in reversed(range(len(points))):
        x, y = points[i]
        if y >= bound:
            if i + 1 == len(points):
                return x
            next_x, next_y = points[i + 1]
            return x * (next_x / x) ** ((y - bound) / (y - next_y)) if y > bound else x
    return None
