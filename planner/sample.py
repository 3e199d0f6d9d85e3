"""What one candidate came to: simulations of it in windows of the traffic, as figures with intervals of 95 %.

Trials.sample ──Trial──▶ planner.workers: Setting.run ──Run──▶ Sample: parts that follow each other ──▶ Point

A mean is a ratio of sums over parts, and its variance that of the residuals of the parts within their strata
(Cochran, Sampling Techniques, 1977, chapter 6).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from planner.answer import Estimate, Point
from planner.candidate import Candidate
from planner.figures import Distribution, Slo, distribution, quantile
from planner.profile import Profile
from planner.simulate import Bottleneck, Run, simulate
from planner.traffic.windows import Window

NUM_PARTS = 8
"""Into which the requests of a sample are cut for its intervals, at least."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulation."""

    candidate: Candidate
    window: int
    """Its number."""
    load: float
    """The rate of its requests, over that of the traffic."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all trials of a plan share. A process that simulates gets it once."""

    windows: tuple[Window, ...]
    """That stand for all of the traffic."""
    prefill: Profile
    decode: Profile
    slo: Slo

    @property
    def rate(self) -> float:
        """Requests a second of the traffic."""
        return self.windows[0].trace_rate

    def run(self, trial: Trial) -> Run:
        """Simulate it, and keep of what was served that of the requests that count. Deterministic, but for cpu_s."""
        window = self.windows[trial.window]
        run = simulate(
            trial.candidate,
            [replace(request, at_s=request.at_s / trial.load) for request in window.requests],
            prefill=self.prefill,
            decode=self.prefill if trial.candidate.machine == "prefill" else self.decode,
            slo=self.slo,
        )
        served = zip(window.requests, run.served, strict=True)
        return msgspec.structs.replace(
            run, served=tuple(one for request, one in served if window.counts(request))
        )


class Trials:
    """Every trial that was made, and those under way: each is made once."""

    def __init__(self, setting: Setting, run: Callable[[Trial], Awaitable[Run]]) -> None:
        self.setting = setting
        self._run = run
        self._runs: dict[Trial, asyncio.Future[Run]] = {}

    async def sample(self, candidate: Candidate, load: float) -> Sample:
        """The candidate in all windows, at so many times the rate of the traffic."""
        setting = self.setting
        numbers = range(len(setting.windows))
        trials = [Trial(candidate=candidate, window=number, load=load) for number in numbers]
        for trial in trials:
            if trial not in self._runs:
                self._runs[trial] = asyncio.ensure_future(self._run(trial))
        runs = await asyncio.gather(*(self._runs[trial] for trial in trials))
        return Sample(candidate, setting.rate * load, load, setting.windows, tuple(runs))

    @property
    def made(self) -> list[Run]:
        """All that are done."""
        return [run.result() for run in self._runs.values() if run.done()]


class Parts(NamedTuple):
    """Requests in parts that follow each other. Each stands for some of the traffic, which is its weight."""

    totals: _Floats
    """Of each part, the sum of a figure over its requests, with their weight."""
    sizes: _Floats
    """Of each part, the weights of its requests."""
    strata: Sequence[int]

    @property
    def mean(self) -> float:
        """Of the figure, over all requests of the traffic; 0 over none."""
        return float(self.totals.sum() / (self.sizes.sum() or 1.0))

    @property
    def residuals(self) -> _Floats:
        """What each part adds to the mean beyond its share."""
        found: _Floats = (self.totals - self.mean * self.sizes) / (self.sizes.sum() or 1.0)
        return found


@dataclass(frozen=True)
class Sample:
    """One candidate at one rate: a run for each window."""

    candidate: Candidate
    rate: float
    """Requests a second that arrive."""
    load: float
    windows: tuple[Window, ...]
    runs: tuple[Run, ...]

    @cached_property
    def ttft_s(self) -> _Floats:
        """Of every request that counts; infinite of those that failed."""
        return np.array([one.ttft_s if one else math.inf for run in self.runs for one in run.served])

    @cached_property
    def itl_s(self) -> _Floats:
        """The same."""
        return np.array([one.itl_s if one else math.inf for run in self.runs for one in run.served])

    @cached_property
    def weights(self) -> _Floats:
        """For how many requests of the traffic each of them stands."""
        counted: Counter[int] = Counter()
        for window, run in zip(self.windows, self.runs, strict=True):
            counted[window.stratum] += len(run.served)
        each = [window.num_reqs / max(1, counted[window.stratum]) for window in self.windows]
        return np.repeat(each, [len(run.served) for run in self.runs])

    @cached_property
    def _cuts(self) -> tuple[list[int], list[int]]:
        """Where each part begins, and its stratum; equal for samples of the same windows."""
        begins, strata, first = [], [], 0
        for window, run in zip(self.windows, self.runs, strict=True):
            count = len(run.served)
            num = max(1, min(-(-NUM_PARTS // len(self.windows)), count))
            begins += [first + i * count // num for i in range(num)]
            strata += [window.stratum] * num
            first += count
        return begins, strata

    def is_good(self, slo: Slo) -> npt.NDArray[np.bool_]:
        """Of every request that counts, whether it meets both SLOs."""
        good: npt.NDArray[np.bool_] = (self.ttft_s <= slo.ttft_s) & (self.itl_s <= slo.itl_s)
        return good

    def good_share(self, slo: Slo) -> float:
        """Of the requests of the traffic, those that meet both SLOs."""
        return self.good_parts(slo).mean

    def good_parts(self, slo: Slo) -> Parts:
        """For an estimate of the good share, or of how it differs from another's."""
        begins, strata = self._cuts
        totals = np.add.reduceat(self.weights * self.is_good(slo), begins)
        return Parts(totals, np.add.reduceat(self.weights, begins), strata)

    def slo_factor(self, slo: Slo, good_share: float) -> float:
        """What both SLOs must be multiplied by for that share of requests to meet them; infinite: too many fail."""
        return quantile(
            np.maximum(self.ttft_s / slo.ttft_s, self.itl_s / slo.itl_s), self.weights, good_share
        )

    def point(self, slo: Slo, good_share: float) -> Point:
        """What an answer says of it."""
        share = estimate(self.good_parts(slo))
        share = Estimate(value=share.value, low=max(0.0, share.low), high=min(1.0, share.high))
        factor = self.slo_factor(slo, good_share)
        stages = [run.stages_s for run in self.runs if run.stages_s]
        return Point(
            rate=self.rate,
            load=self.load,
            num_reqs=len(self.ttft_s),
            num_failed=int(np.isinf(self.ttft_s).sum()),
            goodput=share.times(self.rate),
            good_share=share,
            slo_factor=factor if factor < math.inf else None,
            ttft_s=self._percentiles(self.ttft_s),
            itl_s=self._percentiles(self.itl_s),
            busy={name: fmean(run.busy[name] for run in self.runs) for name in self.runs[0].busy},
            transfer_bytes_s=fmean(run.transfer_bytes_s for run in self.runs),
            cached_share=fmean(run.cached_share for run in self.runs),
            stages_s={str(stage): fmean(one[stage] for one in stages) for stage in stages[0]}
            if stages
            else {},
            bottleneck=str(self._bottleneck()),
        )

    def _percentiles(self, seconds: _Floats) -> Distribution | None:
        served = np.isfinite(seconds)
        return distribution(seconds[served], self.weights[served]) if served.any() else None

    def _bottleneck(self) -> Bottleneck:
        """That of most runs, among those that have one, if most have."""
        found = [run.bottleneck for run in self.runs if run.bottleneck is not Bottleneck.NONE]
        return max(found, key=found.count) if 2 * len(found) > len(self.runs) else Bottleneck.NONE


def estimate(parts: Parts) -> Estimate:
    """The mean with its interval. A single part has no interval that is known: its mean is taken for exact."""
    return _interval(parts.mean, parts.residuals, parts.strata)


def difference(ours: Parts, theirs: Parts) -> Estimate:
    """The mean of ours less that of theirs: what both have in common, such as a burst of requests, cancels out."""
    return _interval(ours.mean - theirs.mean, ours.residuals - theirs.residuals, ours.strata)


def _interval(value: float, residuals: _Floats, strata: Sequence[int]) -> Estimate:
    if min(Counter(strata).values()) == 1:  # a stratum of one part has no variance of its own
        strata = [0] * len(strata)
    groups = [residuals[np.equal(strata, stratum)] for stratum in set(strata)]
    freedom = len(residuals) - len(groups)
    half = 0.0
    if freedom:
        variance = sum(len(group) * group.var(ddof=1) for group in groups)
        half = float(stdtrit(freedom, 0.975) * math.sqrt(variance))
    return Estimate(value=value, low=value - half, high=value + half)
