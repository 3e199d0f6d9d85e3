"""A figure that was measured several times: its median, and how far the rounds were apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def figure(name: str, rounds: Iterable[float], digits: int = 3) -> dict[str, Any]:
    """`name` as the median of its rounds, and `name_spread` as their 10th and 90th percentile.

    Of fewer than ten rounds those are the least and the most.
    """
    ordered = sorted(rounds)
    return {
        name: significant(statistics.median(ordered), digits),
        f"{name}_spread": [significant(percentile(ordered, p), digits) for p in (10, 90)],
    }


def ratios(achieved: Sequence[float], limit: Sequence[float]) -> list[float]:
    """Round by round: a busy moment of the machine touches both."""
    return [a / b for a, b in zip(achieved, limit, strict=True)]


def hidden_share(step_off_s: float, step_on_s: float, forward_s: float) -> float:
    """The share of what scheduling adds to a forward that overlap hides: 1 all of it, 0 nothing."""
    return 1 - (step_on_s - forward_s) / (step_off_s - forward_s)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest rank of a sorted list."""
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]


def significant(value: float, digits: int = 3) -> float:
    """Rounded to so many significant digits; whole numbers keep all of theirs."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(digits - 1 - math.floor(math.log10(abs(value))), 0))
