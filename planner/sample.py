"""What one candidate came to at one rate: a simulation of it, as figures with intervals of 95 %.

Trials.sample ──Trial──▶ planner.workers: Setting.run ──Run──▶ Sample: parts that follow each other ──▶ Point

A mean is a ratio of sums over parts, and its variance that of the residuals of the parts (Cochran, Sampling
Techniques, 1977, chapter 6).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from planner.answer import Estimate, Point
from planner.candidate import Candidate
from planner.figures import Distribution, Slo, distribution, quantile
from planner.plan_traffic import Traffic
from planner.profile import Profile
from planner.simulate import Run, simulate

NUM_PARTS = 8
"""Into which the requests of a sample are cut for its intervals."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a fleet is to reach."""

    slo: Slo
    good_share: float
    """Of the requests, those that are to meet both SLOs, at least."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulation."""

    candidate: Candidate
    load: float
    """The rate of its requests, over that of the traffic."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all trials of a plan share. A process that simulates gets it once."""

    traffic: Traffic
    profile: Profile
    aim: Aim

    def run(self, trial: Trial) -> Run:
        """Simulate it, and keep of what was served that of the requests that count. Deterministic."""
        run = simulate(
            trial.candidate,
            [replace(request, at_s=request.at_s / trial.load) for request in self.traffic.requests],
            profile=self.profile,
            slo=self.aim.slo,
        )
        return msgspec.structs.replace(run, served=run.served[self.traffic.num_warmup :])


class Trials:
    """Every trial that was made, and those under way: each is made once."""

    def __init__(self, setting: Setting, run: Callable[[Trial], Awaitable[Run]]) -> None:
        self.setting = setting
        self._run = run
        self._runs: dict[Trial, asyncio.Future[Run]] = {}

    async def sample(self, candidate: Candidate, load: float) -> Sample:
        """The candidate at so many times the rate of the traffic."""
        trial = Trial(candidate=candidate, load=load)
        if trial not in self._runs:
            self._runs[trial] = asyncio.ensure_future(self._run(trial))
        return Sample(candidate, self.setting, load, await self._runs[trial])


class Parts(NamedTuple):
    """Requests in parts that follow each other."""

    totals: _Floats
    """Of each part, the sum of a figure over its requests."""
    sizes: _Floats
    """Of each part, how many requests it has."""

    @property
    def mean(self) -> float:
        """Of the figure, over all requests."""
        return float(self.totals.sum() / self.sizes.sum())

    @property
    def residuals(self) -> _Floats:
        """What each part adds to the mean beyond its share."""
        found: _Floats = (self.totals - self.mean * self.sizes) / self.sizes.sum()
        return found


@dataclass(frozen=True)
class Sample:
    """One candidate at one rate."""

    candidate: Candidate
    setting: Setting
    load: float
    run: Run

    @property
    def rate(self) -> float:
        """Requests a second that arrive."""
        return self.setting.traffic.rate * self.load

    @cached_property
    def ttft_s(self) -> _Floats:
        """Of every request that counts; infinite of those that failed."""
        return np.array([one.ttft_s if one else math.inf for one in self.run.served])

    @cached_property
    def itl_s(self) -> _Floats:
        """The same."""
        return np.array([one.itl_s if one else math.inf for one in self.run.served])

    @cached_property
    def good(self) -> Parts:
        """The requests that meet both SLOs: for an estimate of their share, or of how it differs from another's."""
        slo, num = self.setting.aim.slo, len(self.ttft_s)
        begins = np.arange(min(NUM_PARTS, num)) * num // min(NUM_PARTS, num)
        good = (self.ttft_s <= slo.ttft_s) & (self.itl_s <= slo.itl_s)
        return Parts(np.add.reduceat(good.astype(float), begins), np.diff(begins, append=num).astype(float))

    @property
    def meets(self) -> bool:
        """Whether enough requests meet both SLOs."""
        return self.good.mean >= self.setting.aim.good_share

    @property
    def slo_factor(self) -> float:
        """What both SLOs must be multiplied by for enough requests to meet them; infinite: too many fail."""
        aim = self.setting.aim
        return quantile(np.maximum(self.ttft_s / aim.slo.ttft_s, self.itl_s / aim.slo.itl_s), aim.good_share)

    def point(self) -> Point:
        """What an answer says of it."""
        share, factor = estimate(self.good), self.slo_factor
        return Point(
            rate=self.rate,
            load=self.load,
            num_reqs=len(self.ttft_s),
            num_failed=int(np.isinf(self.ttft_s).sum()),
            good_share=Estimate(value=share.value, low=max(0.0, share.low), high=min(1.0, share.high)),
            slo_factor=factor if factor < math.inf else None,
            ttft_s=_percentiles(self.ttft_s),
            itl_s=_percentiles(self.itl_s),
            busy=self.run.busy,
            transfer_bytes_s=self.run.transfer_bytes_s,
            cached_share=self.run.cached_share,
            bottleneck=str(self.run.bottleneck),
        )


def _percentiles(seconds: _Floats) -> Distribution | None:
    served = np.isfinite(seconds)
    return distribution(seconds[served]) if served.any() else None


def estimate(parts: Parts) -> Estimate:
    """The mean with its interval. A single part has no interval that is known: its mean is taken for exact."""
    return _interval(parts.mean, parts.residuals)


def difference(ours: Parts, theirs: Parts) -> Estimate:
    """The mean of ours less that of theirs: what both have in common, such as a burst of requests, cancels out."""
    return _interval(ours.mean - theirs.mean, ours.residuals - theirs.residuals)


def _interval(value: float, residuals: _Floats) -> Estimate:
    num = len(residuals)
    half = float(stdtrit(num - 1, 0.975) * math.sqrt(num * residuals.var(ddof=1))) if num > 1 else 0.0
    return Estimate(value=value, low=value - half, high=value + half)
