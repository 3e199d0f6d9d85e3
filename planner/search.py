"""The search: every candidate over rates, first in a part of the traffic, then in all of it if it may be the best.

    every candidate ──screen──▶ Curve ──cannot be the best──▶ its figures stay those of the screen
                                  └──may be the best──all windows──▶ Curve ──choose──▶ the best

All candidates see the same requests, at rates of one common grid, so what they differ in is not the luck of the draw.
In all windows are simulated: the candidates that may be the smallest to meet the SLOs; and of the fleets with as many
nodes as the best one, one fewer or one more, those that may serve the highest rate. If that shows another number of
nodes to be the best, it goes on around that one, so that an easy or a hard screen does no harm.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.answer import Estimate, Point
from planner.candidate import Candidate
from planner.figures import Slo
from planner.sample import SCREEN, Sample, Trials, Variation, difference, estimate

STEPS = 8
"""Rates for each doubling. The highest rate is interpolated between two that are a step apart."""
MAX_DOUBLINGS = 6
"""Loads from 1/64 to 64 of the traffic's are tried."""
STEP = 2 ** (1 / STEPS)
NEARLY = 1.05
"""Candidates that all miss the SLOs are as near to them if their slo_factor differs by no more."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a fleet is to reach."""

    slo: Slo
    good_share: float

    def is_met_by(self, sample: Sample) -> bool:
        """Whether enough requests meet both SLOs."""
        return sample.good_share(self.slo) >= self.good_share


@dataclass(frozen=True)
class Curve:
    """What one candidate did at each rate that was tried."""

    candidate: Candidate
    aim: Aim
    samples: tuple[Sample, ...]
    """Ascending loads, one of them 1."""
    is_screened: bool
    """Whether it was tried in the screen alone."""

    @property
    def step(self) -> int:
        """The highest step of the grid of rates that meets the aim, or the lowest that was tried if none does.

        Step 0 is the rate of the traffic, and STEPS more are twice the rate.
        """
        met = [one for one in self.samples if self.aim.is_met_by(one)] or self.samples[:1]
        return round(STEPS * math.log2(met[-1].load))

    @property
    def now(self) -> Sample:
        """The sample at the rate of the traffic."""
        return next(sample for sample in self.samples if sample.load == 1.0)

    def point(self) -> Point:
        """At the rate of the traffic, as an answer says it."""
        return self.now.point(self.aim.slo, self.aim.good_share)

    @property
    def meets(self) -> bool:
        """Whether the aim is met at the rate of the traffic."""
        return self.aim.is_met_by(self.now)

    @cached_property
    def max_rate(self) -> Estimate | None:
        """The highest rate at which enough requests meet both SLOs; its interval is that of the shares around it."""
        shares = [estimate(sample.good_parts(self.aim.slo)) for sample in self.samples]
        rates = [sample.rate for sample in self.samples]
        value = crossing(
            [(rate, share.value) for rate, share in zip(rates, shares, strict=True)], self.aim.good_share
        )
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
        return self.aim.is_met_by(self.samples[-1])

    @property
    def slo_factor(self) -> float:
        """What both SLOs must be multiplied by to be met at the rate of the traffic; infinite if none is enough."""
        return self.now.slo_factor(self.aim.slo, self.aim.good_share)


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


async def curve(
    trials: Trials, candidate: Candidate, aim: Aim, windows: Sequence[int], near: int | None = None
) -> Curve:
    """The candidate at the rate of the traffic, and around the highest rate that it serves within the aim.

    That rate is searched from the step `near` on, by steps that double; without one, by doubled rates.
    """
    samples: dict[int, Sample] = {}
    stride, end = STEPS if near is None else 1, STEPS * MAX_DOUBLINGS

    async def meets(step: int) -> bool:
        samples[step] = await trials.sample(candidate, windows, Variation(load=STEP**step))
        return aim.is_met_by(samples[step])

    low = high = near or 0
    if near:
        await meets(0)
    sign = 1 if await meets(low) else -1
    while low == high and sign * low < end:  # until one of the two meets the aim, and the other does not
        ahead = max(-end, min(end, low + sign * stride))
        is_met = await meets(ahead)
        if is_met == (sign > 0):
            low = high = ahead
        else:
            low, high = (low, ahead) if sign > 0 else (ahead, high)
        stride = min(2 * stride, STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await meets(middle) else (low, middle)
    return Curve(
        candidate, aim, tuple(samples[step] for step in sorted(samples)), tuple(windows) == (SCREEN,)
    )


async def search(
    trials: Trials,
    candidates: Sequence[Candidate],
    aim: Aim,
    report: Callable[[Curve], None],
) -> list[Curve]:
    """A curve of every candidate, in their order: over all windows of those that may be the best."""

    async def one(candidate: Candidate, windows: Sequence[int], near: int | None = None) -> Curve:
        found = await curve(trials, candidate, aim, windows, near)
        report(found)
        return found

    whole = trials.setting.whole
    if trials.setting.windows == (trials.setting.screen,):
        return list(await asyncio.gather(*(one(candidate, whole) for candidate in candidates)))
    screened = await asyncio.gather(*(one(candidate, (SCREEN,)) for candidate in candidates))
    known = list(screened)
    while True:
        num_nodes = (await choose(trials, known)).candidate.num_nodes
        wanted = [
            at
            for at, seen in enumerate(known)
            if seen.is_screened
            and (
                (abs(seen.candidate.num_nodes - num_nodes) <= 1 and _may_be_best(seen, screened))
                or _may_be_smallest(seen, known)
            )
        ]
        if not wanted:
            return known
        found = await asyncio.gather(*(one(known[at].candidate, whole, known[at].step) for at in wanted))
        for at, seen in zip(wanted, found, strict=True):
            known[at] = seen


def _may_be_best(one: Curve, curves: Sequence[Curve]) -> bool:
    """Of those with as many nodes. Its interval does not end a step of the grid below that of the best."""
    rivals = [other for other in curves if other.candidate.num_nodes == one.candidate.num_nodes]
    lows = [rival.max_rate.low for rival in rivals if rival.max_rate]
    if not lows:
        return one.slo_factor <= STEP * NEARLY * min(rival.slo_factor for rival in rivals)
    return one.max_rate is not None and one.max_rate.high * STEP >= max(lows)


def _may_be_smallest(one: Curve, curves: Sequence[Curve]) -> bool:
    """Of those that meet the aim at the rate of the traffic."""
    rate = one.now.rate
    sure = [other for other in curves if other.max_rate and other.max_rate.low >= rate * STEP]
    least = min((other.candidate.num_nodes for other in sure), default=one.candidate.num_nodes)
    return one.max_rate is not None and one.max_rate.high * STEP >= rate and one.candidate.num_nodes <= least


# -------------------------------------------------------------------------------------------------- the best
async def tied_with_best(trials: Trials, curves: Sequence[Curve]) -> list[Curve]:
    """Those with the highest rate within the aim, but for what may be chance; the simplest one comes first.

    A curve is tied with the one of the highest rate if, at a rate that only just is too much for that one, its good
    share differs by no more than noise.
    """
    slo = curves[0].aim.slo
    best = max(curves, key=lambda one: one.most)
    if not best.max_rate:
        least = min(one.slo_factor for one in curves)
        near = [one for one in curves if one.slo_factor <= NEARLY * least]
        return sorted(near, key=lambda one: (*one.candidate.simplicity, one.slo_factor))
    windows = (SCREEN,) if best.is_screened else trials.setting.whole
    too_much = next((s for s in best.samples if s.rate > best.most), best.samples[-1])

    async def ties(one: Curve) -> bool:
        if one is best or one.most * NEARLY >= best.most:
            return True
        ours = await trials.sample(one.candidate, windows, Variation(load=too_much.load))
        return not difference(too_much.good_parts(slo), ours.good_parts(slo)).is_more_than_noise

    able = [one for one in curves if one.max_rate]
    tied = [one for one, is_tied in zip(able, await asyncio.gather(*map(ties, able)), strict=True) if is_tied]
    return sorted(tied, key=lambda one: (*one.candidate.simplicity, -one.most))


async def choose(trials: Trials, curves: Sequence[Curve]) -> Curve:
    """The smallest that meets the aim at the rate of the traffic; if none does, that with the most goodput.

    If those that have most cannot be told apart, for example where no request meets the SLOs, it is the one that
    comes nearest to them.
    """
    full = [one for one in curves if not one.is_screened] or list(curves)
    meeting = [one for one in full if one.meets]
    if meeting:
        least = min(one.candidate.num_nodes for one in meeting)
        return (await tied_with_best(trials, [one for one in meeting if one.candidate.num_nodes == least]))[0]
    slo = full[0].aim.slo
    most_good = max(full, key=lambda one: one.now.good_share(slo)).now.good_parts(slo)
    tied = [one for one in full if not difference(most_good, one.now.good_parts(slo)).is_more_than_noise]
    nearest = min(one.slo_factor for one in tied)
    near = [one for one in tied if one.slo_factor <= NEARLY * nearest]
    return min(near, key=lambda one: (one.candidate.num_nodes, *one.candidate.simplicity, one.slo_factor))
