"""Trials: one option, one window of the traffic, one seed; each simulated once, in one of several processes.

Trials.sample ──Trial──▶ Workers ──pipe──▶ process: simulate ──Run──▶ Sample, over windows and seeds
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from planner.cost_model import CostModel
from planner.figures import Slo
from planner.plan_sample import Option, Sample
from planner.profile import Profile, RouterCost, TransferCost
from planner.simulate import Run, simulate
from planner.traffic.trace import SimRequest
from planner.traffic.windows import Window


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
    transfer, router = profile.transfer, profile.router
    return msgspec.structs.replace(
        profile,
        forward=CostModel(**{name: factor * seconds for name, seconds in asdict(profile.forward).items()}),
        transfer=TransferCost(
            latency_s=factor * transfer.latency_s,
            bytes_s=None if transfer.bytes_s is None else transfer.bytes_s / factor,
            message_s=factor * transfer.message_s,
        ),
        router=RouterCost(
            **{name: factor * seconds for name, seconds in msgspec.structs.asdict(router).items()}
        ),
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
