"""The search: every candidate over rates, and which of them is the best.

All candidates see the same requests, at rates of one common grid, so what they differ in is not the luck of the draw.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.answer import Estimate
from planner.candidate import Candidate
from planner.sample import Sample, Trials, difference, estimate

STEPS = 8
"""Rates for each doubling. The highest rate is interpolated between two that are a step apart."""
MAX_DOUBLINGS = 6
"""Loads from 1/64 to 64 of the traffic's are tried."""
STEP = 2 ** (1 / STEPS)
NEARLY = 1.05
"""Candidates that all miss the SLOs are as near to them if their slo_factor differs by no more."""


@dataclass(frozen=True)
class Curve:
    """What one candidate did at each rate that was tried."""

    candidate: Candidate
    samples: tuple[Sample, ...]
    """Ascending loads, one of them 1."""

    @property
    def now(self) -> Sample:
        """The sample at the rate of the traffic."""
        return next(sample for sample in self.samples if sample.load == 1.0)

    @cached_property
    def max_rate(self) -> Estimate | None:
        """The highest rate at which enough requests meet both SLOs; its interval is that of the shares around it."""
        shares = [estimate(sample.good) for sample in self.samples]
        rates = [sample.rate for sample in self.samples]
        points = [(rate, share.value) for rate, share in zip(rates, shares, strict=True)]
        value = crossing(points, self.now.setting.aim.good_share)
        if value is None or value == rates[-1]:
            return None if value is None else Estimate(value=value, low=value, high=value)
        above = bisect_right(rates, value)
        here, there = shares[above - 1], shares[above]
        doubt = (here.high - here.low + there.high - there.low) / 4
        doublings = math.log2(rates[above] / rates[above - 1]) * doubt / max(here.value - there.value, 1e-9)
        width = 2 ** min(1.0, doublings)
        return Estimate(value=value, low=value / width, high=value * width)

    @property
    def most(self) -> float:
        """The highest rate, or 0."""
        return self.max_rate.value if self.max_rate else 0.0

    @property
    def is_bound(self) -> bool:
        """Whether enough requests meet both SLOs at the highest rate that was tried, so `max_rate` may be higher."""
        return self.samples[-1].meets


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


async def curve(trials: Trials, candidate: Candidate) -> Curve:
    """The candidate at the rate of the traffic, and around the highest rate that it serves within the aim.

    That rate is searched by doubled or halved rates, and then by bisection to a step of the grid.
    """
    samples: dict[int, Sample] = {}
    end = STEPS * MAX_DOUBLINGS

    async def meets(step: int) -> bool:
        samples[step] = await trials.sample(candidate, STEP**step)
        return samples[step].meets

    low = high = 0
    if await meets(0):
        while low == high and high < end:
            high += STEPS
            low = high if await meets(high) else low
    else:
        while low == high and low > -end:
            low -= STEPS
            high = low if not await meets(low) else high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await meets(middle) else (low, middle)
    return Curve(candidate, tuple(samples[step] for step in sorted(samples)))


# -------------------------------------------------------------------------------------------------- the best
async def tied_with_best(trials: Trials, curves: Sequence[Curve]) -> list[Curve]:
    """Those with the highest rate within the aim, but for what may be chance; the simplest one comes first.

    A curve is tied with the one of the highest rate if, at a rate that only just is too much for that one, its good
    share differs by no more than noise.
    """
    best = max(curves, key=lambda one: one.most)
    if not best.max_rate:
        return nearest(curves)
    too_much = next((s for s in best.samples if s.rate > best.most), best.samples[-1])

    async def ties(one: Curve) -> bool:
        if one is best or one.most * NEARLY >= best.most:
            return True
        ours = await trials.sample(one.candidate, too_much.load)
        return not difference(too_much.good, ours.good).is_more_than_noise

    able = [one for one in curves if one.max_rate]
    tied = [one for one, is_tied in zip(able, await asyncio.gather(*map(ties, able)), strict=True) if is_tied]
    return sorted(tied, key=lambda one: (*one.candidate.simplicity, -one.most))


async def choose(trials: Trials, curves: Sequence[Curve]) -> list[Curve]:
    """The smallest that meets the aim at the rate of the traffic; if none does, that with the most goodput.

    If those that have most cannot be told apart, for example where no request meets the SLOs, it is the one that
    comes nearest to them. Behind it stand those of as many nodes that cannot be told from it.
    """
    meeting = [one for one in curves if one.now.meets]
    if meeting:
        least = min(one.candidate.num_nodes for one in meeting)
        return await tied_with_best(trials, [one for one in meeting if one.candidate.num_nodes == least])
    most_good = max((one.now.good for one in curves), key=lambda good: good.mean)
    tied = [one for one in curves if not difference(most_good, one.now.good).is_more_than_noise]
    near = nearest(tied)
    least = min(one.candidate.num_nodes for one in near)
    return [one for one in near if one.candidate.num_nodes == least]


def nearest(curves: Sequence[Curve]) -> list[Curve]:
    """Those that are nearest to the SLOs, if all miss them, or nearly so; the simplest one comes first."""
    least = min(one.now.slo_factor for one in curves)
    near = [one for one in curves if one.now.slo_factor <= NEARLY * least]
    return sorted(near, key=lambda one: (*one.candidate.simplicity, one.now.slo_factor))
