"""From rounds to coefficients: least squares over relative errors, none negative, and what is doubtful about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from planner.cost_model import CostModel
from planner.profile import Residual

POOR_FIT = 0.2
"""A point that is further from the fit, as a share of what was measured, is named."""
NOISY = 0.25
"""Rounds of a point that are further apart, as a share of their median, are noise."""
COLD = 1.25
"""How many times as long as later rounds the second round of most points takes while caches are cold."""
MIN_COLD_ROUNDS = 3
MAX_FLOOR_TOKENS = 1024
"""Forwards of more tokens are never at the floor: no device needs so many to be busy."""
MEASURABLE = 0.01
"""Bytes that add a smaller share of the latency to the longest transfer cannot be told from noise: rounds of a point
differ by more."""
MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What was measured at one point, in the order in which it was; the first round of all was dropped before."""

    what: str
    seconds: tuple[float, ...]

    @property
    def typical_s(self) -> float:
        """The median."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """(upper - lower quartile) / median."""
        return spread(self.seconds)


def spread(seconds: Sequence[float]) -> float:
    """How far rounds are apart: (upper - lower quartile) / median."""
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle)


@dataclass(frozen=True, kw_only=True)
class ExtendPoint(Rounds):
    """A forward over parts of prompts."""

    spans: tuple[tuple[int, int], ...]
    """(start, length) of each."""

    @property
    def num_tokens(self) -> int:
        """That are computed."""
        return sum(length for _, length in self.spans)

    @property
    def row(self) -> tuple[float, float, float]:
        """What a, b and c are multiplied with."""
        return 1, self.num_tokens, sum((start + length) ** 2 - start**2 for start, length in self.spans)


@dataclass(frozen=True, kw_only=True)
class DecodePoint(Rounds):
    """A decode step."""

    batch: int
    kv_tokens: int

    @property
    def row(self) -> tuple[float, float, float]:
        """What d, e and f are multiplied with."""
        return 1, self.batch, self.kv_tokens


@dataclass(frozen=True, kw_only=True)
class HostPoint(Rounds):
    """The scheduler's own work for a forward of `num_requests`."""

    num_requests: int

    @property
    def row(self) -> tuple[float, float]:
        """What step_s and step_request_s are multiplied with."""
        return 1, self.num_requests


@dataclass(frozen=True, kw_only=True)
class TransferPoint(Rounds):
    """Pages of `nbytes` from one node to another."""

    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Forwards:
    """All that was measured on the engine."""

    extends: tuple[ExtendPoint, ...]
    decodes: tuple[DecodePoint, ...]
    hosts: tuple[HostPoint, ...]

    def fit(self) -> CostModel:
        """The coefficients."""
        a, b, c, floor_s = fit_extends(self.extends)
        d, e, f = fit(self.decodes, [point.row for point in self.decodes])
        step_s, step_request_s = fit(self.hosts, [point.row for point in self.hosts])
        return CostModel(
            a=a, b=b, c=c, d=d, e=e, f=f, floor_s=floor_s, step_s=step_s, step_request_s=step_request_s
        )

    def residuals(self, costs: CostModel) -> tuple[Residual, ...]:
        """Every forward, and the scheduler's work for it, against the fit."""
        return (
            *(residual(point, costs.extend_s(point.spans)) for point in self.extends),
            *(residual(point, costs.decode_s(point.batch, point.kv_tokens)) for point in self.decodes),
            *(residual(point, costs.host_s(point.num_requests)) for point in self.hosts),
        )


def nonnegative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares over relative errors, by coefficients of which none is negative, nor is any number in `rows`."""
    x = np.array(rows, dtype=float) / np.array(seconds, dtype=float)[:, None]
    scale = np.maximum(x.max(axis=0), np.finfo(float).tiny)  # a column may be all zeros
    solution, _ = nnls(x / scale, np.ones(len(x)))
    return [float(value) for value in solution / scale]


def fit(points: Sequence[Rounds], rows: Sequence[Sequence[float]]) -> list[float]:
    """The coefficients of `rows` that come to what is typical of `points`."""
    return nonnegative(rows, [point.typical_s for point in points])


def fit_extends(points: Sequence[ExtendPoint]) -> tuple[float, float, float, float]:
    """a, b, c and floor_s. The floor is that of the first so many points by time with which all are met best.

    The points above the floor may all have as many tokens, and then do not tell a and b apart: a may be 0 as well.
    """
    points = sorted(points, key=lambda point: point.typical_s)
    seconds = np.array([point.typical_s for point in points])
    rows = np.array([point.row for point in points], dtype=float)
    most = sum(point.num_tokens <= MAX_FLOOR_TOKENS for point in points)
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


def fit_transfers(points: Sequence[TransferPoint]) -> tuple[float, float | None]:
    """Seconds of latency, and bytes a second; None where the longest transfer took no measurable time for its bytes.

    Then the latency alone is what any number of bytes takes.
    """
    latency_s, byte_s = fit(points, [(1, point.nbytes) for point in points])
    if byte_s * max(point.nbytes for point in points) < MEASURABLE * latency_s:
        return fit(points, [(1,) for _ in points])[0], None
    return latency_s, 1 / byte_s


def residual(point: Rounds, fitted_s: float) -> Residual:
    """One point against its fit."""
    return Residual(
        what=point.what, measured_s=point.typical_s, fitted_s=fitted_s, spread=round(point.spread, 4)
    )


# ---------------------------------------------------------------------------------------------- remarks
def remarks_of(points: Sequence[Rounds], residuals: Sequence[Residual]) -> Iterator[str]:
    """What rounds and residuals say against themselves, each a sentence."""
    noisy = [point for point in points if point.spread > NOISY]
    if 4 * len(noisy) > len(points):
        worst = max(noisy, key=lambda point: point.spread)
        yield (
            f"The rounds of {len(noisy)} of {len(points)} points are further apart than {NOISY:.0%} of their median, "
            f"up to {worst.spread:.0%} ({worst.what}): something else used the machine, or its clock changed; "
            "measure again when it is idle."
        )
    cold = [point for point in points if is_cold(point)]
    if 2 * len(cold) > len(points):
        yield (
            f"The second round of {len(cold)} of {len(points)} points took more than {COLD:g} times as long as later "
            "ones: caches were still cold, so what is measured early may be too slow; measure again."
        )
    poor = sorted((one for one in residuals if abs(one.error) > POOR_FIT), key=lambda one: -abs(one.error))
    if poor:
        named = ", ".join(f"{one.what} by {one.error:+.0%}" for one in poor[:MAX_NAMED])
        yield (
            f"The fit is off by more than {POOR_FIT:.0%} at {len(poor)} of {len(residuals)} points ({named}): where "
            "the traffic has many of those, predictions are off as well."
        )
    fewest = min(points, key=lambda point: len(point.seconds))
    if len(fewest.seconds) < MIN_COLD_ROUNDS:
        yield (
            f"Only {len(fewest.seconds)} rounds of {fewest.what} were measured in the given time: noise and cold "
            "caches may have gone unnoticed."
        )


def is_cold(point: Rounds) -> bool:
    """Whether the rounds of a point begin much slower than they go on; of noise nothing can be told."""
    first, *later = point.seconds
    return (
        len(later) + 1 >= MIN_COLD_ROUNDS
        and first > COLD * float(np.median(later))
        and spread(later) <= NOISY
    )
