"""From which prompt length, rate or SLO on splitting starts to pay, and what another load or cost would change.

Splitting pays where the best split meets the SLOs and has more goodput than the same machines together, by more than
noise. That is tried on the real simulator, outwards from the traffic as it is: upwards while the split meets the
SLOs, downwards while the machines together miss one, and by bisection between the first that differ. Beyond,
splitting cannot pay, since more load or longer prompts never help a fleet.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.answer import Sensitivity, Threshold
from planner.estimate import difference, is_more_than_noise
from planner.figures import Slo
from planner.plan_sample import Option, Sample
from planner.plan_search import STEP, Aim, Curve, options
from planner.plan_trials import AS_ASKED, Trials, Variation
from planner.words import seconds

MAX_FACTOR = 8.0
"""A threshold is searched from 1/8 to 8 times what was asked for."""
GRID = tuple(2 ** (i / 2) for i in range(-6, 7))
FINE_GRID = tuple(STEP**i for i in range(-24, 25))
"""For SLOs, which need no simulation of their own."""
CHANGES = (0.8, 1.2)

Axis = Literal["prompt", "rate", "slo_ttft", "slo_itl"]
UNITS: dict[Axis, Literal["tokens", "requests/s", "s"]] = {
    "prompt": "tokens",
    "rate": "requests/s",
    "slo_ttft": "s",
    "slo_itl": "s",
}


@dataclass(frozen=True)
class Duel:
    """The best of the splits against the best of the same machines together, at one point of an axis."""

    split: Sample
    together: Sample
    pays: bool
    split_meets: bool
    together_misses: bool
    """At least one request misses an SLO there."""


class AxisSearch:
    """Duels along one axis. Splits are tried next to the best one of the point before."""

    def __init__(self, trials: Trials, aim: Aim, rivals: Sequence[Option], axis: Axis) -> None:
        self._trials = trials
        self._aim = aim
        self._together = [option for option in rivals if not option.candidate.splits]
        self._splits = [option for option in rivals if option.candidate.splits]
        self._axis = axis
        self.duels: dict[float, Duel] = {}
        """By factor."""

    async def walk(self, factors: Sequence[float]) -> None:
        """Outwards from 1, which is one of the ascending `factors`."""
        here = await self.duel(1.0, self._splits[len(self._splits) // 2])
        is_free = self._axis in ("slo_ttft", "slo_itl")
        duel = here
        for factor in (factor for factor in factors if factor > 1.0):
            if not duel.split_meets and not is_free:
                break
            duel = await self.duel(factor, duel.split.option)
        duel = here
        for factor in reversed([factor for factor in factors if factor < 1.0]):
            if not duel.together_misses and not is_free:
                break
            duel = await self.duel(factor, duel.split.option)

    async def duel(self, factor: float, near: Option) -> Duel:
        """At one point. The best split is searched from `near` on, one node of a role more or less at a time."""
        slo, varied = self._at(factor)

        def share(sample: Sample) -> float:
            return sample.good_share(slo)

        seen: dict[Option, Sample] = {}
        best = near
        while True:
            at = self._splits.index(best)
            around = self._splits[max(0, at - 1) : at + 2]
            sampled = await asyncio.gather(*(self._sample(one, varied) for one in around))
            seen |= dict(zip(around, sampled, strict=True))
            better = max(around, key=lambda one: share(seen[one]))
            if share(seen[better]) <= share(seen[best]):
                break
            best = better
        both = await asyncio.gather(*(self._sample(one, varied) for one in self._together))
        split, together = seen[best], max(both, key=share)
        aim = Aim(slo=slo, good_share=self._aim.good_share)
        meets = aim.is_met_by(split)
        gain = difference(split.good_parts(slo), together.good_parts(slo))
        duel = self.duels[factor] = Duel(
            split,
            together,
            pays=meets and gain.low > 0,
            split_meets=meets,
            together_misses=share(together) < 1.0,
        )
        return duel

    async def edge(self, inside: float, outside: float) -> float:
        """Between a factor where splitting pays and one where it does not, within a step of the grid if it can be."""
        while max(inside / outside, outside / inside) > STEP * 1.001:
            middle = math.sqrt(inside * outside)
            if self._axis == "prompt":
                middle = self._trials.setting.prompt_factor(middle)
                if middle in (inside, outside):
                    break
            pays = (await self.duel(middle, self.duels[inside].split.option)).pays
            inside, outside = (middle, outside) if pays else (inside, middle)
        return math.sqrt(inside * outside)

    async def _sample(self, option: Option, varied: Variation) -> Sample:
        return await self._trials.sample(option, self._trials.setting.whole, varied)

    def _at(self, factor: float) -> tuple[Slo, Variation]:
        slo = self._aim.slo
        match self._axis:
            case "prompt":
                return slo, Variation(prompt=factor)
            case "rate":
                return slo, Variation(load=factor)
            case "slo_ttft":
                return Slo(ttft_s=slo.ttft_s * factor, itl_s=slo.itl_s), AS_ASKED
            case "slo_itl":
                return Slo(ttft_s=slo.ttft_s, itl_s=slo.itl_s * factor), AS_ASKED


async def thresholds(
    trials: Trials,
    aim: Aim,
    curves: Sequence[Curve],
    num_nodes: int,
    machines: Sequence[str],
    now: dict[Axis, float],
    max_prompt: float,
) -> list[Threshold]:
    """On each axis, for `num_nodes`. `now` is where the traffic is; prompts may become `max_prompt` times as long."""
    rivals = options(range(num_nodes, num_nodes + 1), machines)
    tried = {sample.load for one in curves if one.option in rivals for sample in one.samples}
    prompts = sorted({trials.setting.prompt_factor(factor) for factor in GRID})
    grids: dict[Axis, Sequence[float]] = {
        "prompt": [factor for factor in prompts if factor <= max_prompt],
        "rate": sorted({load for load in tried if 1 / MAX_FACTOR <= load <= MAX_FACTOR} | set(GRID)),
        "slo_ttft": FINE_GRID,
        "slo_itl": FINE_GRID,
    }
    return list(
        await asyncio.gather(
            *(
                _threshold(AxisSearch(trials, aim, rivals, axis), axis, now[axis], grid)
                for axis, grid in grids.items()
            )
        )
    )


async def _threshold(search: AxisSearch, axis: Axis, now: float, grid: Sequence[float]) -> Threshold:
    await search.walk(grid)
    duels, tried = search.duels, sorted(search.duels)
    paying = [factor for factor in tried if duels[factor].pays]
    nearest = min(paying, key=lambda factor: abs(math.log(factor)), default=1.0)
    low = high = None
    if paying:
        at = tried.index(nearest)
        below = next((factor for factor in reversed(tried[:at]) if not duels[factor].pays), None)
        above = next((factor for factor in tried[at:] if not duels[factor].pays), None)
        inside = [factor for factor in paying if (below or 0) < factor < (above or math.inf)]
        low = None if below is None else now * await search.edge(min(inside), below)
        high = None if above is None else now * await search.edge(max(inside), above)
    split, together = duels[nearest].split.option.name, duels[nearest].together.option.name
    return Threshold(
        axis=axis,
        unit=UNITS[axis],
        now=now,
        pays="nowhere" if not paying else "everywhere" if low is None and high is None else "between",
        pays_from=low,
        pays_to=high,
        searched_low=now * grid[0],
        searched_high=now * grid[-1],
        split=split,
        together=together,
        words=f"{_words(axis, now, grid, low, high, pays=bool(paying))}: {split} against {together}.",
    )


def _words(
    axis: Axis, now: float, grid: Sequence[float], low: float | None, high: float | None, *, pays: bool
) -> str:
    what = {"prompt": "mean prompts", "rate": "rates", "slo_ttft": "SLOs on TTFT", "slo_itl": "SLOs on ITL"}[
        axis
    ]
    least, most = _value(axis, now * grid[0]), _value(axis, now * grid[-1])
    is_cut = axis == "prompt" and grid[-1] < MAX_FACTOR
    end = ", as far as the context allows" if is_cut else ""
    if not pays:
        words = f"Splitting does not pay for {what} from {least} to {most}{end}"
    elif low is None:
        words = f"Splitting pays for {what} from {least}, the least that was tried, to "
        words += f"{most}{end or ', the most'}" if high is None else _value(axis, high)
    else:
        words = f"Splitting pays for {what} from {_value(axis, low)} "
        words += f"on (tried up to {most}{end})" if high is None else f"to {_value(axis, high)}"
    return f"{words} (now {_value(axis, now)})"


def _value(axis: Axis, value: float) -> str:
    match axis:
        case "prompt":
            return f"{value:.0f} tokens"
        case "rate":
            return f"{value:.3g} requests/s"
        case _:
            return seconds(value)


# ------------------------------------------------------------------------------------------------ sensitivity
async def sensitivity(
    trials: Trials, verdict: Curve, curves: Sequence[Curve], price_of: Callable[[Option], float]
) -> list[Sensitivity]:
    """What 20 % more or less load or cost would change, among all that were simulated over the whole traffic."""
    rivals = [one for one in curves if not one.is_screened]
    asked: list[Awaitable[Sensitivity]] = [
        _sensitivity(trials, verdict, rivals, price_of, what, factor)
        for what in ("load", "cost")
        for factor in CHANGES
    ]
    return list(await asyncio.gather(*asked))


async def _sensitivity(
    trials: Trials,
    verdict: Curve,
    rivals: Sequence[Curve],
    price_of: Callable[[Option], float],
    what: Literal["load", "cost"],
    factor: float,
) -> Sensitivity:
    aim, windows = verdict.aim, verdict.windows
    varied = replace(AS_ASKED, **{what: factor})
    samples = await asyncio.gather(*(trials.sample(one.option, windows, varied) for one in rivals))
    ours = next(sample for sample in samples if sample.option == verdict.option)

    def rank(sample: Sample) -> tuple[bool, float, float]:
        meets = aim.is_met_by(sample)
        return not meets, price_of(sample.option) if meets else 0.0, -sample.good_share(aim.slo)

    best = min(samples, key=rank)
    is_as_good = rank(best)[:2] == rank(ours)[:2] and not is_more_than_noise(
        difference(best.good_parts(aim.slo), ours.good_parts(aim.slo))
    )
    best = ours if is_as_good else best
    return Sensitivity(
        what=what,
        factor=factor,
        best=best.option.name,
        changes=best is not ours,
        goodput_of_best=best.point(aim.slo, aim.good_share).goodput.value,
        goodput_of_verdict=ours.point(aim.slo, aim.good_share).goodput.value,
        meets=aim.is_met_by(ours),
    )
