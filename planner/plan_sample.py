"""What one option came to: its runs, as figures with intervals, and as a point of an answer.

runs, one for each window and seed ──▶ Sample ──▶ parts that follow each other ──▶ planner.estimate ──▶ Point
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import msgspec

from planner.answer import Estimate, FleetUse, Point, Transfer
from planner.candidate import Candidate
from planner.estimate import Part, estimate, mean
from planner.figures import Distribution, Slo, weighted_distribution, weighted_quantile
from planner.simulate import Bottleneck, Run
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
    """In a comparison: each flag that is compared, and its value."""

    @property
    def name(self) -> str:
        """Unique among the options of a plan."""
        if self.settings:
            return " ".join(f"{flag}={value}" for flag, value in self.settings)
        return self.candidate.name + (f" ({self.machine} machines)" if self.machine else "")


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
        shares = Estimate(value=shares.value, low=max(0.0, shares.low), high=min(1.0, shares.high))
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
            goodput=Estimate(
                value=shares.value * self.rate, low=shares.low * self.rate, high=shares.high * self.rate
            ),
            good_share=shares,
            slo_factor=self.slo_factor(slo, good_share),
            ttft_s=percentiles("ttft_s"),
            itl_s=percentiles("itl_s"),
            use=(self._use("prefill"), self._use("decode")) if splits else (self._use("decode"),),
            transfer=Transfer(
                bytes_s=over_runs("transfer_bytes_s"), link_busy_share=over_runs("link_busy_share")
            )
            if splits
            else None,
            router_busy_share=over_runs("router_busy_share"),
            cached_share=over_runs("cached_share"),
            stages_s=self._stages(),
            bottleneck=self._bottleneck(),
        )

    def _use(self, fleet: str) -> FleetUse:
        uses: list[FleetUse] = [getattr(run, fleet) for run in self.runs]
        return msgspec.structs.replace(
            uses[0],
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
