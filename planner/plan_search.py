"""The search: every option over rates, first in a part of the traffic, then those that may be the best in all of it.

    every option ──first window──▶ Curve ──cannot be the best──▶ its figures stay those of the first window (screened)
                                     └──may be the best──all windows──▶ Curve ──choose──▶ the best

All options see the same requests, at rates of one common grid, so what they differ in is not the luck of the draw.
In all windows are simulated: the options that may be the cheapest to meet the SLOs; and of the fleets with as many
nodes as the best one, one fewer or one more, those that may serve the highest rate. An option may do that unless even
the upper end of its interval is a step of the grid (9 %) below the lower end of the best one's. If that shows another
number of nodes to be the best, it goes on around that one, so that an easy or a hard screen does no harm.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.answer import Difference, Estimate
from planner.candidate import Candidate
from planner.estimate import crossing, difference, estimate, is_more_than_noise
from planner.figures import Slo
from planner.plan_sample import Option, Sample
from planner.plan_trials import SCREEN, Trials, Variation

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


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What one node of each role costs an hour."""

    prefill: float
    decode: float

    def of(self, option: Option) -> float:
        """What the fleet costs an hour."""
        if option.machine == "prefill":
            return self.prefill * option.candidate.num_nodes
        return self.prefill * option.candidate.num_prefill + self.decode * option.candidate.num_decode


@dataclass(frozen=True)
class Curve:
    """What one option did at each rate that was tried."""

    option: Option
    aim: Aim
    samples: tuple[Sample, ...]
    """Ascending loads, one of them 1."""
    windows: tuple[int, ...]

    @property
    def is_screened(self) -> bool:
        """Whether it was tried in the first window alone."""
        return self.windows == (SCREEN,)

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
    def is_bound(self) -> bool:
        """Whether enough requests meet both SLOs at the highest rate that was tried, so `max_rate` may be higher."""
        return self.aim.is_met_by(self.samples[-1])

    @property
    def simplicity(self) -> tuple[bool, bool, str]:
        """A key to sort by: the smaller it is, the simpler the fleet is to run."""
        candidate = self.option.candidate
        return candidate.splits, bool(candidate.enable_mixed_chunk), self.option.machine

    @property
    def slo_factor(self) -> float:
        """What both SLOs must be multiplied by to be met at the rate of the traffic; infinite if none is enough."""
        factor = self.now.slo_factor(self.aim.slo, self.aim.good_share)
        return float("inf") if factor is None else factor


def options(nodes: range, machines: Sequence[str]) -> list[Option]:
    """Every split of so many nodes, and the same machines together, with mixed chunks and without.

    `machines` are those on which nodes may do both: prefill and decode where these differ, else one without a name.
    """
    return [
        option
        for num in nodes
        for option in (
            *(
                Option(
                    candidate=Candidate(num_prefill=0, num_decode=num, enable_mixed_chunk=mixed),
                    machine=machine,
                )
                for machine in machines
                for mixed in (False, True)
            ),
            *(Option(candidate=Candidate(num_prefill=p, num_decode=num - p)) for p in range(1, num)),
        )
    ]


async def curve(
    trials: Trials, option: Option, aim: Aim, windows: Sequence[int], near: int | None = None
) -> Curve:
    """The option at the rate of the traffic, and around the highest rate that it serves within the aim.

    That rate is searched from the step `near` on, by steps that double; without one, by doubled rates.
    """
    samples: dict[int, Sample] = {}
    stride, end = STEPS if near is None else 1, STEPS * MAX_DOUBLINGS

    async def meets(step: int) -> bool:
        samples[step] = await trials.sample(option, windows, Variation(load=STEP**step))
        return aim.is_met_by(samples[step])

    low = high = near or 0
    if near:
        await meets(0)
    if await meets(low):
        while low == high and high < end:
            high = min(high + stride, end)
            low, stride = high if await meets(high) else low, min(2 * stride, STEPS)
    else:
        while low == high and low > -end:
            low = max(low - stride, -end)
            high, stride = low if not await meets(low) else high, min(2 * stride, STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await meets(middle) else (low, middle)
    return Curve(option, aim, tuple(samples[step] for step in sorted(samples)), tuple(windows))


async def search(
    trials: Trials,
    asked: Sequence[Option],
    aim: Aim,
    price_of: Callable[[Option], float],
    report: Callable[[Curve], None],
) -> list[Curve]:
    """A curve of every option, in their order: over all windows of those that may be the best."""

    async def one(option: Option, windows: Sequence[int], near: int | None = None) -> Curve:
        found = await curve(trials, option, aim, windows, near)
        report(found)
        return found

    whole = trials.setting.whole
    if trials.setting.windows == (trials.setting.screen,):
        return list(await asyncio.gather(*(one(option, whole) for option in asked)))
    screened = await asyncio.gather(*(one(option, (SCREEN,)) for option in asked))
    full: dict[Option, Curve] = {}
    while True:
        known = [full.get(seen.option, seen) for seen in screened]
        num_nodes = (await choose(trials, known, price_of)).option.candidate.num_nodes
        wanted = [
            seen
            for seen in known
            if seen.is_screened
            and (
                (abs(seen.option.candidate.num_nodes - num_nodes) <= 1 and may_be_best(seen, screened))
                or may_be_cheapest(seen, known, price_of)
            )
        ]
        if not wanted:
            return known
        found = await asyncio.gather(*(one(seen.option, whole, seen.step) for seen in wanted))
        full |= {seen.option: seen for seen in found}


def may_be_best(one: Curve, curves: Sequence[Curve]) -> bool:
    """Whether it may be the best of those with as many nodes."""
    rivals = [other for other in curves if other.option.candidate.num_nodes == one.option.candidate.num_nodes]
    if not any(rival.max_rate for rival in rivals):
        return one.slo_factor <= STEP * NEARLY * min(rival.slo_factor for rival in rivals)
    most = max(rival.max_rate.low for rival in rivals if rival.max_rate)
    return one.max_rate is not None and one.max_rate.high * STEP >= most


def may_be_cheapest(one: Curve, curves: Sequence[Curve], price_of: Callable[[Option], float]) -> bool:
    """Whether it may be the cheapest that meets the aim at the rate of the traffic."""
    rate = one.now.rate
    sure = [other for other in curves if other.max_rate and other.max_rate.low >= rate * STEP]
    least = min((price_of(other.option) for other in sure), default=float("inf"))
    return one.max_rate is not None and one.max_rate.high * STEP >= rate and price_of(one.option) <= least


# -------------------------------------------------------------------------------------------------- the best
async def tied_with_best(trials: Trials, curves: Sequence[Curve]) -> list[Curve]:
    """Those with the highest rate within the aim, but for what may be chance; the simplest one comes first.

    A curve is tied with the one of the highest rate if, at a rate that only just is too much for that one, its good
    share differs by no more than noise.
    """
    aim = curves[0].aim
    able = [one for one in curves if one.max_rate]
    if not able:
        least = min(one.slo_factor for one in curves)
        return sorted(
            (one for one in curves if one.slo_factor <= NEARLY * least),
            key=lambda one: (*one.simplicity, one.slo_factor),
        )
    rates = {id(one): one.max_rate.value for one in able if one.max_rate}
    best = max(able, key=lambda one: rates[id(one)])
    too_much = next((s for s in best.samples if s.rate > rates[id(best)]), best.samples[-1])
    varied = Variation(load=too_much.load)

    async def ties(one: Curve) -> bool:
        if one is best or rates[id(one)] * NEARLY >= rates[id(best)]:
            return True
        windows = best.windows
        ours, theirs = await asyncio.gather(
            trials.sample(one.option, windows, varied), trials.sample(best.option, windows, varied)
        )
        return not is_more_than_noise(difference(theirs.good_parts(aim.slo), ours.good_parts(aim.slo)))

    tied = [one for one, is_tied in zip(able, await asyncio.gather(*map(ties, able)), strict=True) if is_tied]
    return sorted(tied, key=lambda one: (*one.simplicity, -rates[id(one)]))


async def choose(trials: Trials, curves: Sequence[Curve], price_of: Callable[[Option], float]) -> Curve:
    """The cheapest that meets the aim at the rate of the traffic; if none does, that with the most goodput.

    If those that have most cannot be told apart, for example where no request meets the SLOs, it is the one that
    comes nearest to them.
    """
    full = [one for one in curves if not one.is_screened] or list(curves)
    meeting = [one for one in full if one.aim.is_met_by(one.now)]
    if meeting:
        least = min(price_of(one.option) for one in meeting)
        return (await tied_with_best(trials, [one for one in meeting if price_of(one.option) == least]))[0]
    slo = full[0].aim.slo
    most_good = max(full, key=lambda one: one.now.good_share(slo)).now.good_parts(slo)
    tied = [one for one in full if not is_more_than_noise(difference(most_good, one.now.good_parts(slo)))]
    nearest = min(one.slo_factor for one in tied)
    near = [one for one in tied if one.slo_factor <= NEARLY * nearest]
    return min(near, key=lambda one: (price_of(one.option), *one.simplicity, one.slo_factor))


def differs(base: Sample, other: Sample, slo: Slo) -> Difference:
    """`other` against `base`, on the same requests."""
    rate = other.rate
    share = difference(other.good_parts(slo), base.good_parts(slo))
    goodput = Estimate(value=rate * share.value, low=rate * share.low, high=rate * share.high)
    ttft, itl = (difference(other.parts_of(name), base.parts_of(name)) for name in ("ttft_s", "itl_s"))
    return Difference(
        base=base.option.name,
        goodput=goodput,
        ttft_mean_s=ttft,
        itl_mean_s=itl,
        is_more_than_noise=any(map(is_more_than_noise, (goodput, ttft, itl))),
    )
