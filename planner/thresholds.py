"""From which prompt length, rate or SLO on splitting starts to pay.

Splitting pays where the best split meets the SLOs and has more goodput than the same machines together, by more than
noise. That is tried on the real simulator, outwards from the traffic as it is: upwards while a split meets the SLOs,
downwards while the machines together miss one, and by bisection between the first that differ. Beyond, splitting
cannot pay, since more load or longer prompts never help a fleet.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.answer import Threshold
from planner.candidate import Candidate
from planner.figures import Slo
from planner.sample import AS_ASKED, Sample, Trials, Variation, difference
from planner.search import STEP, Aim
from planner.words import rate, seconds

MAX_FACTOR = 8.0
"""A threshold is searched from 1/8 to 8 times what was asked for."""
GRID = tuple(2 ** (i / 2) for i in range(-6, 7))
FINE_GRID = tuple(STEP**i for i in range(-24, 25))
"""For SLOs, which need no simulation of their own."""

Axis = Literal["prompt", "rate", "slo_ttft", "slo_itl"]
_WORDS: dict[Axis, str] = {
    "prompt": "mean prompts",
    "rate": "rates",
    "slo_ttft": "SLOs on TTFT",
    "slo_itl": "SLOs on ITL",
}


@dataclass(frozen=True)
class _Duel:
    """The best of the splits against the best of the same machines together, at one point of an axis."""

    split: Sample
    together: Sample
    pays: bool
    split_meets: bool
    together_misses: bool
    """At least one request misses an SLO there."""


class _AxisSearch:
    """Duels along one axis."""

    def __init__(self, trials: Trials, aim: Aim, rivals: Sequence[Candidate], axis: Axis) -> None:
        self._trials = trials
        self._aim = aim
        self._rivals = rivals
        self._axis = axis
        self.duels: dict[float, _Duel] = {}
        """By factor."""

    async def walk(self, factors: Sequence[float]) -> None:
        """Outwards from 1, which is one of the ascending `factors`."""
        here = await self.duel(1.0)
        is_free = self._axis in ("slo_ttft", "slo_itl")
        above = [factor for factor in factors if factor > 1.0]
        below = [factor for factor in reversed(factors) if factor < 1.0]
        for outwards in (above, below):
            duel = here
            for factor in outwards:
                may_pay = duel.split_meets if factor > 1.0 else duel.together_misses
                if not may_pay and not is_free:
                    break
                duel = await self.duel(factor)

    async def duel(self, factor: float) -> _Duel:
        """At one point."""
        slo, varied = self._at(factor)
        samples = await asyncio.gather(*(self._trials.sample(one, varied) for one in self._rivals))
        ordered = sorted(samples, key=lambda one: one.good_share(slo), reverse=True)
        split = next(one for one in ordered if one.candidate.splits)
        together = next(one for one in ordered if not one.candidate.splits)
        meets = split.good_share(slo) >= self._aim.good_share
        gain = difference(split.good_parts(slo), together.good_parts(slo))
        misses = together.good_share(slo) < 1.0
        duel = self.duels[factor] = _Duel(split, together, meets and gain.low > 0, meets, misses)
        return duel

    async def edge(self, inside: float, outside: float) -> float:
        """Between a factor where splitting pays and one where it does not, within a step of the grid if it can be."""
        while max(inside / outside, outside / inside) > STEP * 1.001:
            middle = math.sqrt(inside * outside)
            if self._axis == "prompt":
                middle = self._trials.setting.prompt_factor(middle)
                if middle in (inside, outside):
                    break
            inside, outside = (middle, outside) if (await self.duel(middle)).pays else (inside, middle)
        return math.sqrt(inside * outside)

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
    rivals: Sequence[Candidate],
    now: dict[Axis, float],
    loads: set[float],
    max_prompt: float,
) -> list[Threshold]:
    """On each axis, for `rivals` of as many nodes. `now` is where the traffic is; `loads` were tried already.

    Prompts may become `max_prompt` times as long.
    """
    prompts = sorted({trials.setting.prompt_factor(factor) for factor in GRID})
    grids: dict[Axis, Sequence[float]] = {
        "prompt": [factor for factor in prompts if factor <= max_prompt],
        "rate": sorted({load for load in loads if 1 / MAX_FACTOR <= load <= MAX_FACTOR} | set(GRID)),
        "slo_ttft": FINE_GRID,
        "slo_itl": FINE_GRID,
    }
    searches = [
        _threshold(_AxisSearch(trials, aim, rivals, axis), axis, now[axis], grids[axis]) for axis in grids
    ]
    return list(await asyncio.gather(*searches))


async def _threshold(search: _AxisSearch, axis: Axis, now: float, grid: Sequence[float]) -> Threshold:
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
    split, together = duels[nearest].split.candidate.name, duels[nearest].together.candidate.name
    return Threshold(
        axis=axis,
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
    what = _WORDS[axis]
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
    if axis == "prompt":
        return f"{value:.0f} tokens"
    return rate(value) if axis == "rate" else seconds(value)
