"""Trials: one option, one window of the traffic, one seed; each simulated once, in one of several processes.

Trials.sample ──Trial──▶ Workers ──pipe──▶ process: simulate ──Run──▶ Sample, over windows and seeds
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import msgspec

from planner import answer
from planner.answer import Point
from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.estimate import estimate
from planner.figures import Distribution, Slo, distribution
from planner.profile import Profile, RouterCost, TransferCost
from planner.simulate import Bottleneck, Run, simulate
from planner.traffic.trace import SimRequest

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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulation."""

    option: Option
    window: int
    seed: int
    variation: Variation


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all trials of a plan share. A worker process gets it once."""

    windows: tuple[tuple[SimRequest, ...], ...]
    rate: float
    """Requests a second of the traffic, over all windows."""
    prefill: Profile
    decode: Profile
    slo: Slo

    def run(self, trial: Trial) -> Run:
        """Simulate it. Deterministic, but for the CPU seconds."""
        varied = trial.variation
        prefill, decode = (costing(profile, varied.cost) for profile in (self.prefill, self.decode))
        return simulate(
            trial.option.candidate,
            [vary(request, varied) for request in self.windows[trial.window]],
            prefill=prefill,
            decode=prefill if trial.option.machine == "prefill" else decode,
            slo=self.slo,
            seed=trial.seed,
        )


def vary(request: SimRequest, varied: Variation) -> SimRequest:
    """The request in other traffic."""
    block_tokens = max(1, round(request.block_tokens * varied.prompt))
    scaled = block_tokens / request.block_tokens
    return replace(
        request,
        at_s=request.at_s / varied.load,
        input_len=max(1, round(request.input_len * scaled)),
        block_tokens=block_tokens,
    )


def costing(profile: Profile, factor: float) -> Profile:
    """The profile of a machine that takes `factor` times as long for everything."""
    if factor == 1.0:
        return profile
    forward, transfer, router = profile.forward, profile.transfer, profile.router
    return msgspec.structs.replace(
        profile,
        forward=CostModel(**{name: factor * getattr(forward, name) for name in forward.__dataclass_fields__}),
        transfer=TransferCost(latency_s=factor * transfer.latency_s, bytes_s=transfer.bytes_s / factor),
        router=RouterCost(request_s=factor * router.request_s, token_s=factor * router.token_s),
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
    runs: tuple[Run, ...]

    shares: dict[Slo, list[float]] = field(default_factory=dict, compare=False)
    """What `good_shares` has computed."""

    @cached_property
    def parts(self) -> list[list[Seen]]:
        """The requests in parts that follow each other. Samples of the same windows and seeds have the same parts."""
        each = -(-NUM_PARTS // len(self.runs))
        parts = []
        for run in self.runs:
            seen = [FAILED if one is None else Seen(one.ttft_s, one.itl_s) for one in run.served]
            num, count = min(each, len(seen)), len(seen)
            parts += [seen[i * count // num : (i + 1) * count // num] for i in range(num)]
        return parts

    @property
    def seen(self) -> list[Seen]:
        """Every request."""
        return [one for part in self.parts for one in part]

    def good_shares(self, slo: Slo) -> list[float]:
        """Of each part."""
        if slo not in self.shares:
            ttft_s, itl_s = slo.ttft_s, slo.itl_s
            self.shares[slo] = [
                sum(one.ttft_s <= ttft_s and one.itl_s <= itl_s for one in part) / len(part)
                for part in self.parts
            ]
        return self.shares[slo]

    def means(self, field: str) -> list[float]:
        """Of ttft_s or itl_s, for each part; of a part of which no request was served, 0."""
        return [
            fmean([getattr(one, field) for one in part if one is not FAILED] or [0.0]) for part in self.parts
        ]

    def slo_factor(self, slo: Slo, good_share: float) -> float | None:
        """What both SLOs must be multiplied by for that share of the requests to meet them."""
        return self._quantile(lambda one: max(one.ttft_s / slo.ttft_s, one.itl_s / slo.itl_s), good_share)

    def quantile(self, field: str, share: float) -> float | None:
        """The seconds of ttft_s or itl_s that `share` of all requests are within. None: too many have failed."""
        return self._quantile(lambda one: float(getattr(one, field)), share)

    def _quantile(self, of: Callable[[Seen], float], share: float) -> float | None:
        values = sorted(map(of, self.seen))
        value = values[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
        return value if value < math.inf else None

    def point(self, slo: Slo, good_share: float) -> Point:
        """What an answer says of it."""
        shares = estimate(self.good_shares(slo))
        shares = answer.Estimate(value=shares.value, low=max(0.0, shares.low), high=min(1.0, shares.high))
        seen, splits = self.seen, self.option.candidate.splits
        served = [one for one in seen if one is not FAILED]

        def mean(field: str) -> float:
            return fmean(getattr(run, field) for run in self.runs)

        def percentiles(field: str) -> Distribution | None:
            values = [getattr(one, field) for one in served]
            return distribution(values) if values else None

        return Point(
            rate=self.rate,
            load=self.load,
            num_reqs=len(seen),
            num_failed=len(seen) - len(served),
            goodput=answer.Estimate(
                value=shares.value * self.rate, low=shares.low * self.rate, high=shares.high * self.rate
            ),
            good_share=shares,
            slo_factor=self.slo_factor(slo, good_share),
            ttft_s=percentiles("ttft_s"),
            itl_s=percentiles("itl_s"),
            use=(self._use("prefill"), self._use("decode")) if splits else (self._use("together"),),
            transfer=answer.Transfer(
                bytes_s=mean("transfer_bytes_s"), link_busy_share=mean("link_busy_share")
            )
            if splits
            else None,
            router_busy_share=mean("router_busy_share"),
            cached_share=mean("cached_share"),
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

    async def sample(self, option: Option, windows: int, variation: Variation = AS_ASKED) -> Sample:
        """The option in the first `windows` windows."""
        runs = await asyncio.gather(
            *(
                self._once(Trial(option=option, window=window, seed=seed, variation=variation))
                for window in range(windows)
                for seed in self._seeds
            )
        )
        return Sample(option, self.setting.rate * variation.load, variation.load, tuple(runs))

    def _once(self, trial: Trial) -> asyncio.Future[Run]:
        if trial not in self._runs:
            self._runs[trial] = asyncio.ensure_future(self._run(trial))
        return self._runs[trial]

    def made(self, option: Option | None = None) -> list[Run]:
        """All that are done, of one option or of all."""
        return [
            run.result() for trial, run in self._runs.items() if run.done() and option in (None, trial.option)
        ]
