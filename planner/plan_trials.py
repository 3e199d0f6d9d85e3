"""Trials: one option, one window of the traffic, one seed; each simulated once, in one of several processes.

Trials.sample ──Trial──▶ Workers ──pipe──▶ process: simulate ──Run──▶ Sample, over windows and seeds
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import msgspec

from planner import answer
from planner.answer import Point
from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.estimate import Part, estimate, mean, weighted_distribution, weighted_quantile
from planner.figures import Distribution, Slo
from planner.profile import Profile, RouterCost, TransferCost
from planner.simulate import Bottleneck, Run, simulate
from planner.traffic.trace import SimRequest
from planner.traffic.windows import Window

NUM_PARTS = 8
"""Into which the requests of a sample are cut for its intervals, at least."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A candidate and the machines that it runs on."""

    candidate: Candidate
    machine: str = ""
    """Of nodes that do both, where the two fleets have different profiles: prefill or decode."""
    settings: tuple[tuple[str, str], ...] = ()
    """In a comparison: flag and value of what differs from the base."""

    @property
    def name(self) -> str:
        """Unique among the options of a plan."""
        if self.settings:
            return " ".join(f"{flag}={value}" for flag, value in self.settings)
        return self.candidate.name + (f" ({self.machine} machines)" if self.machine else "")


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Of the question: everything times so much."""

    load: float = 1.0
    """The rate."""
    prompt: float = 1.0
    """The length of prompts, with the share that is reused."""
    cost: float = 1.0
    """Seconds of forwards, transfers and the router."""


AS_ASKED = Variation()
SCREEN = -1
"""The number of `Setting.screen`."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulation."""

    option: Option
    window: int
    """Its number, or SCREEN."""
    seed: int
    variation: Variation


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all trials of a plan share. A worker process gets it once."""

    screen: Window
    """A part of the traffic in which every option is tried first."""
    windows: tuple[Window, ...]
    """That stand for all of the traffic."""
    prefill: Profile
    decode: Profile
    slo: Slo

    @property
    def rate(self) -> float:
        """Requests a second of the traffic."""
        return self.windows[0].trace_rate

    def window(self, number: int) -> Window:
        """Of a trial."""
        return self.screen if number == SCREEN else self.windows[number]

    def number(self, number: int) -> int:
        """The same for equal windows: where the screen is one of the windows, that one's."""
        return self.windows.index(self.screen) if number == SCREEN and self.screen in self.windows else number

    @property
    def whole(self) -> tuple[int, ...]:
        """The numbers of all windows but the screen."""
        return tuple(range(len(self.windows)))

    def prompt_factor(self, factor: float) -> float:
        """The nearest one by which prompts can be multiplied: a block has a whole number of tokens."""
        block_tokens = self.windows[0].requests[0].block_tokens
        return max(1, round(factor * block_tokens)) / block_tokens

    def run(self, trial: Trial) -> Run:
        """Simulate it, and keep of what was served that of the requests that count. Deterministic, but for cpu_s."""
        varied, window = trial.variation, self.window(trial.window)
        prefill, decode = (costing(profile, varied.cost) for profile in (self.prefill, self.decode))
        run = simulate(
            trial.option.candidate,
            [vary(request, varied) for request in window.requests],
            prefill=prefill,
            decode=prefill if trial.option.machine == "prefill" else decode,
            slo=self.slo,
            seed=trial.seed,
        )
        served = zip(window.requests, run.served, strict=True)
        return msgspec.structs.replace(
            run, served=tuple(one for request, one in served if window.counts(request))
        )


def vary(request: SimRequest, varied: Variation) -> SimRequest:
    """The request in other traffic, with a factor of prompts that is one of `Setting.prompt_factor`."""
    return replace(
        request,
        at_s=request.at_s / varied.load,
        input_len=max(1, round(request.input_len * varied.prompt)),
        block_tokens=round(request.block_tokens * varied.prompt),
    )


def costing(profile: Profile, factor: float) -> Profile:
    """The profile of a machine that takes `factor` times as long for everything."""
    if factor == 1.0:
        return profile
    forward, transfer, router = profile.forward, profile.transfer, profile.router
    return msgspec.structs.replace(
        profile,
        forward=CostModel(**{name: factor * getattr(forward, name) for name in forward.__dataclass_fields__}),
        transfer=TransferCost(
            latency_s=factor * transfer.latency_s,
            bytes_s=transfer.bytes_s / factor,
            message_s=factor * transfer.message_s,
        ),
        router=RouterCost(
            request_s=factor * router.request_s,
            token_s=factor * router.token_s,
            prompt_token_s=factor * router.prompt_token_s,
        ),
    )


class Seen(NamedTuple):
    """What a client saw of one request."""

    ttft_s: float
    itl_s: float


FAILED = Seen(math.inf, math.inf)


@dataclass(frozen=True)
class Sample:
    """One option under one variation: a run for each window and seed."""

    option: Option
    rate: float
    """Requests a second that arrive."""
    load: float
    windows: tuple[Window, ...]
    """One for each run."""
    runs: tuple[Run, ...]
    good: dict[Slo, list[Part]] = field(default_factory=dict, compare=False)
    """What `good_parts` has computed."""

    @cached_property
    def parts(self) -> list[tuple[int, float, list[Seen]]]:
        """Stratum, weight and requests, in parts that follow each other; equal for samples of the same windows.

        Runs with other seeds have the same requests, so they are in the same parts: they are no further evidence.
        """
        counted: Counter[int] = Counter()
        of_window: dict[int, tuple[Window, list[list[Seen]]]] = {}
        for window, run in zip(self.windows, self.runs, strict=True):
            counted[window.stratum] += len(run.served)
            _, seen = of_window.setdefault(id(window), (window, []))
            seen.append([FAILED if one is None else Seen(one.ttft_s, one.itl_s) for one in run.served])
        each = -(-NUM_PARTS // len(of_window))
        parts = []
        for window, seeds in of_window.values():
            count = len(seeds[0])
            num = max(1, min(each, count))
            weight = window.num_reqs / max(1, counted[window.stratum])
            for i in range(num):
                part = [one for seen in seeds for one in seen[i * count // num : (i + 1) * count // num]]
                parts.append((window.stratum, weight, part))
        return parts

    @cached_property
    def seen(self) -> list[tuple[Seen, float]]:
        """Every request that counts, and its weight."""
        return [(one, weight) for _, weight, part in self.parts for one in part]

    def good_share(self, slo: Slo) -> float:
        """Of the requests of the traffic, those that meet both SLOs."""
        return mean(self.good_parts(slo))

    def good_parts(self, slo: Slo) -> list[Part]:
        """For an estimate of the good share, or of how it differs from another's."""
        if slo not in self.good:
            ttft_s, itl_s = slo.ttft_s, slo.itl_s
            self.good[slo] = [
                Part(
                    stratum,
                    weight,
                    len(part),
                    sum(one.ttft_s <= ttft_s and one.itl_s <= itl_s for one in part),
                )
                for stratum, weight, part in self.parts
            ]
        return self.good[slo]

    def parts_of(self, name: str) -> list[Part]:
        """The same for ttft_s or itl_s, over the requests that were served."""
        figures = [
            (stratum, weight, [getattr(one, name) for one in part if one is not FAILED])
            for stratum, weight, part in self.parts
        ]
        return [Part(stratum, weight, len(values), sum(values)) for stratum, weight, values in figures]

    def slo_factor(self, slo: Slo, good_share: float) -> float | None:
        """What both SLOs must be multiplied by for that share of the requests to meet them."""
        return self._quantile(lambda one: max(one.ttft_s / slo.ttft_s, one.itl_s / slo.itl_s), good_share)

    def quantile(self, name: str, share: float) -> float | None:
        """The seconds of ttft_s or itl_s that `share` of all requests are within. None: too many have failed."""
        return self._quantile(lambda one: float(getattr(one, name)), share)

    def _quantile(self, of: Callable[[Seen], float], share: float) -> float | None:
        value = weighted_quantile(sorted((of(one), weight) for one, weight in self.seen), share)
        return value if value < math.inf else None

    def point(self, slo: Slo, good_share: float) -> Point:
        """What an answer says of it."""
        shares = estimate(self.good_parts(slo))
        shares = answer.Estimate(value=shares.value, low=max(0.0, shares.low), high=min(1.0, shares.high))
        splits = self.option.candidate.splits
        served = [(one, weight) for one, weight in self.seen if one is not FAILED]

        def over_runs(name: str) -> float:
            return fmean(getattr(run, name) for run in self.runs)

        def percentiles(name: str) -> Distribution | None:
            values = [(getattr(one, name), weight) for one, weight in served]
            return weighted_distribution(values) if values else None

        return Point(
            rate=self.rate,
            load=self.load,
            num_reqs=len(self.seen),
            num_failed=len(self.seen) - len(served),
            goodput=answer.Estimate(
                value=shares.value * self.rate, low=shares.low * self.rate, high=shares.high * self.rate
            ),
            good_share=shares,
            slo_factor=self.slo_factor(slo, good_share),
            ttft_s=percentiles("ttft_s"),
            itl_s=percentiles("itl_s"),
            use=(self._use("prefill"), self._use("decode")) if splits else (self._use("together"),),
            transfer=answer.Transfer(
                bytes_s=over_runs("transfer_bytes_s"), link_busy_share=over_runs("link_busy_share")
            )
            if splits
            else None,
            router_busy_share=over_runs("router_busy_share"),
            cached_share=over_runs("cached_share"),
            stages_s=self._stages(),
            bottleneck=self._bottleneck(),
        )

    def _use(self, role: str) -> answer.FleetUse:
        uses = [run.prefill if role == "prefill" else run.decode for run in self.runs]
        return answer.FleetUse(
            role=role,  # type: ignore[arg-type]  # one of the three
            num_nodes=uses[0].nodes,
            busy_share=fmean(use.busy_share for use in uses),
            pool_share=max(use.pool_share for use in uses),
            queued=fmean(use.queued for use in uses),
        )

    def _stages(self) -> dict[str, float]:
        known = [run.stages_s for run in self.runs if run.stages_s]
        return {str(stage): fmean(stages[stage] for stages in known) for stage in known[0]} if known else {}

    def _bottleneck(self) -> str:
        """That of most runs, among those that have one."""
        seen = [run.bottleneck for run in self.runs]
        found: list[Bottleneck] = [one for one in seen if one is not Bottleneck.NONE]
        return str(
            max(found, key=lambda one: found.count(one)) if 2 * len(found) > len(seen) else Bottleneck.NONE
        )


class Trials:
    """Every trial that was made, and those under way: each is made once."""

    def __init__(self, setting: Setting, run: Callable[[Trial], Awaitable[Run]], num_seeds: int = 1) -> None:
        self.setting = setting
        self._run = run
        self._seeds = range(num_seeds)
        self._runs: dict[Trial, asyncio.Future[Run]] = {}

    async def sample(self, option: Option, windows: Sequence[int], variation: Variation = AS_ASKED) -> Sample:
        """The option in the windows of these numbers."""
        numbers = [self.setting.number(window) for window in windows]
        asked = [(window, seed) for window in numbers for seed in self._seeds]
        runs = await asyncio.gather(
            *(
                self._once(Trial(option=option, window=window, seed=seed, variation=variation))
                for window, seed in asked
            )
        )
        return Sample(
            option,
            self.setting.rate * variation.load,
            variation.load,
            tuple(self.setting.window(window) for window, _ in asked),
            tuple(runs),
        )

    def _once(self, trial: Trial) -> asyncio.Future[Run]:
        if trial not in self._runs:
            self._runs[trial] = asyncio.ensure_future(self._run(trial))
        return self._runs[trial]

    def made(self, option: Option | None = None) -> list[Run]:
        """All that are done, of one option or of all."""
        return [
            run.result() for trial, run in self._runs.items() if run.done() and option in (None, trial.option)
        ]
