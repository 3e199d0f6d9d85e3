"""From rounds to coefficients: least squares over relative errors, none negative, and what is doubtful about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from planner.profile import MAX_BYTES_S, Residual

POOR_FIT = 0.2
"""A point that is further from the fit, as a share of what was measured, is named."""
NOISY = 0.25
"""Rounds of a point that are further apart, as a share of their median, are noise."""
MAX_FLOOR_TOKENS = 1024
"""Forwards of more tokens are never at the floor: no device needs so many to be busy."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured at one point."""

    what: str
    row: tuple[float, ...]
    """What the coefficients of its cost are multiplied with."""
    seconds: tuple[float, ...]
    """Of each round, without the first of all."""

    @property
    def typical_s(self) -> float:
        """The median."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """How far rounds are apart: (upper - lower quartile) / median."""
        low, middle, high = np.percentile(self.seconds, (25, 50, 75))
        return float((high - low) / middle)

    def residual(self, coefficients: Sequence[float], floor_s: float = 0.0) -> Residual:
        """Against its fit."""
        fitted_s = max(float(np.dot(self.row, coefficients)), floor_s)
        return Residual(
            what=self.what, measured_s=self.typical_s, fitted_s=fitted_s, spread=round(self.spread, 4)
        )


def nonnegative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares over relative errors, by coefficients of which none is negative, nor is any number in `rows`."""
    x = np.array(rows, dtype=float) / np.array(seconds, dtype=float)[:, None]
    scale = np.maximum(x.max(axis=0), np.finfo(float).tiny)  # a column may be all zeros
    solution, _ = nnls(x / scale, np.ones(len(x)))
    return [float(value) for value in solution / scale]


def fit(points: Sequence[Point]) -> list[float]:
    """The coefficients that come to what is typical of `points`."""
    return nonnegative([point.row for point in points], [point.typical_s for point in points])


def fit_extends(points: Sequence[Point]) -> tuple[float, float, float, float]:
    """a, b, c and floor_s of points whose row begins with 1 and their number of tokens.

    The floor is that of the first so many points by time with which all are met best. The points above the floor may
    all have as many tokens, and then do not tell a and b apart: a may be 0 as well.
    """
    points = sorted(points, key=lambda point: point.typical_s)
    seconds = np.array([point.typical_s for point in points])
    rows = np.array([point.row for point in points], dtype=float)
    most = sum(point.row[1] <= MAX_FLOOR_TOKENS for point in points)
    best: tuple[float, tuple[float, float, float, float]] | None = None
    for num_flat in range(max(min(most, len(points) - rows.shape[1]), 0) + 1):
        floor_s = float(np.median(seconds[:num_flat])) if num_flat else 0.0
        for launch in (1, 0):
            a, b, c = nonnegative((rows[num_flat:] * (launch, 1, 1)).tolist(), seconds[num_flat:].tolist())
            fitted = np.maximum(rows @ np.array((a, b, c)), floor_s)
            error = float(np.sum((fitted / seconds - 1) ** 2))
            if best is None or error < best[0]:
                best = error, (a, b, c, floor_s)
    assert best is not None
    return best[1]


def fit_transfers(points: Sequence[Point]) -> tuple[float, float]:
    """Seconds of latency, and bytes a second, of points whose row is 1 and their bytes."""
    latency_s, byte_s = fit(points)
    return latency_s, 1 / max(byte_s, 1 / MAX_BYTES_S)


def remarks_of(points: Sequence[Point], residuals: Sequence[Residual]) -> Iterator[str]:
    """What rounds and residuals say against themselves, each a sentence."""
    noisy = [point for point in points if point.spread > NOISY]
    if 4 * len(noisy) > len(points):
        worst = max(noisy, key=lambda point: point.spread)
        yield (
            f"The rounds of {len(noisy)} of {len(points)} points are further apart than {NOISY:.0%} of their median, "
            f"up to {worst.spread:.0%} ({worst.what}): something else used the machine, or its clock changed; "
            "measure again when it is idle."
        )
    if poor := [one for one in residuals if abs(one.error) > POOR_FIT]:
        worst_fit = max(poor, key=lambda one: abs(one.error))
        yield (
            f"The fit is off by more than {POOR_FIT:.0%} at {len(poor)} of {len(residuals)} points, most at "
            f"{worst_fit.what} ({worst_fit.error:+.0%}): where traffic has many of those, predictions are off too."
        )
