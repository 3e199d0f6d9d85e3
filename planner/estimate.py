"""Means over the requests of a sample, with intervals of 95 %, and differences on the same requests.

The requests come in parts that follow each other. A mean is a ratio of sums over parts, and its variance that of the
residuals of the parts within their strata (Cochran, Sampling Techniques, 1977, chapter 6).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple

from planner.answer import Estimate

_T = (12.706, 4.303, 3.182, 2.776)
"""Student's t at 97.5 %, from one degree of freedom on; beyond, its expansion around the normal is within 0.3 %."""


class Part(NamedTuple):
    """What some requests that follow each other came to: the sum of a figure, over how many."""

    stratum: int
    weight: float
    """For how many requests of the traffic each of them stands."""
    num: int
    total: float


def mean(parts: Sequence[Part]) -> float:
    """Of the figure, over all requests of the traffic; 0 over none."""
    return sum(one.weight * one.total for one in parts) / (sum(one.weight * one.num for one in parts) or 1.0)


def estimate(parts: Sequence[Part]) -> Estimate:
    """The mean with its interval. A single part has no interval that is known: its mean is taken for exact."""
    return _interval(mean(parts), parts, _residuals(parts))


def difference(ours: Sequence[Part], theirs: Sequence[Part]) -> Estimate:
    """The mean of ours less that of theirs: what both have in common, such as a burst of requests, cancels out."""
    residuals = [one - other for one, other in zip(_residuals(ours), _residuals(theirs), strict=True)]
    return _interval(mean(ours) - mean(theirs), ours, residuals)


def t95(freedom: int) -> float:
    """Half the width of an interval of 95 %, in standard errors, with at least one degree of freedom: Student's t."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


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
            return x * math.exp(math.log(next_x / x) * (y - bound) / (y - next_y))
    return None


def _residuals(parts: Sequence[Part]) -> list[float]:
    ratio, size = mean(parts), sum(one.weight * one.num for one in parts) or 1.0
    return [one.weight * (one.total - ratio * one.num) / size for one in parts]


def _interval(value: float, parts: Sequence[Part], residuals: Sequence[float]) -> Estimate:
    sizes = Counter(one.stratum for one in parts)
    strata: dict[int, list[float]] = defaultdict(list)
    for one, residual in zip(
        parts, residuals, strict=True
    ):  # a stratum of one part has no variance of its own
        strata[one.stratum if min(sizes.values()) > 1 else 0].append(residual)
    freedom = len(parts) - len(strata)
    if freedom == 0:
        return Estimate(value=value, low=value, high=value)
    variance = sum(len(of) / (len(of) - 1) * sum((r - fmean(of)) ** 2 for r in of) for of in strata.values())
    half = t95(freedom) * math.sqrt(variance)
    return Estimate(value=value, low=value - half, high=value + half)
