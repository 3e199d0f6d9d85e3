"""Where the marks of the report's charts go. The template draws them.

Along a chart, places are percent of its width, so that it fits any page without a script and its letters keep their
size. Down it, they are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.answer import CandidateAnswer, Difference, Estimate, Point, Threshold
from planner.figures import Distribution, Slo
from planner.report import words

PLOT_PX = 190
DOTS_PX = 12
BAR_PX = 10
BAR_GAP_PX = 4
POOL_MARK = 0.7
"""Percent of the width."""
NUM_RAMP = 8
"""Colours of splits, from nearly all nodes for decode to nearly all for prefill."""

STAGES = {
    "dispatch": "until the router had nodes",
    "turn": "until it was the turn of its API key",
    "failover": "attempts that lost their nodes",
    "reservation": "until the decode node had pages and a row",
    "fetch": "until cached pages had come from another node",
    "queue": "until the node that prefills began",
    "prefill": "while the prompt was computed",
    "delivery": "messages and the loops of nodes and router",
    "transfer": "behind the first token: until the decode node had all pages",
}


@dataclass(frozen=True)
class Tick:
    """A number beside an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Scale:
    """Values to percent of a width; with `is_log`, by their logarithm. What lies outside goes to the end."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Percent."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(100 * (value - low) / (high - low), 2)

    def ticks(self, text: Callable[[float], str], num: int = 4) -> tuple[Tick, ...]:
        """About `num` round values."""
        return tuple(Tick(self.at(value), text(value)) for value in self._round_values(num))

    def _round_values(self, num: int) -> list[float]:
        if not self.is_log or self.high < 5 * self.low:
            step = nice_step((self.high - self.low) / num)
            first = math.ceil(self.low / step - 1e-9)
            return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits: tuple[int, ...] = (1, 2, 5) if math.log10(self.high / self.low) < 1.5 else (1,)
        every = max(1, len(decades) // (num + 2))
        values = [digit * 10.0**decade for decade in decades[::every] for digit in digits]
        return [value for value in values if self.low <= value * 1.001 and value <= self.high * 1.001]


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def linear(values: Sequence[float], num: int = 4) -> Scale:
    """From 0 to the next round value above all of them."""
    most = max(values, default=0.0)
    if most <= 0:
        return Scale(0.0, 1.0)
    step = nice_step(most / num)
    return Scale(0.0, step * math.ceil(most / step - 1e-9))


def logarithmic(values: Sequence[float]) -> Scale:
    """Around all positive values, with some room at both ends."""
    known = [value for value in values if 0 < value < math.inf] or [1.0]
    return Scale(min(known) / 1.25, max(known) * 1.25, is_log=True)


# ------------------------------------------------------------------------------------------ goodput over rate
@dataclass(frozen=True)
class Mark:
    """One candidate at one rate, with the interval of its goodput."""

    x: float
    y: float
    low: float
    high: float
    tip: str


@dataclass(frozen=True)
class Line:
    """One candidate."""

    name: str
    style: str
    is_best: bool
    marks: tuple[Mark, ...]

    @property
    def points(self) -> str:
        """Of an SVG polyline in a box that is 100 wide."""
        return " ".join(f"{mark.x},{mark.y}" for mark in self.marks)


@dataclass(frozen=True)
class GoodputChart:
    """The candidates with so many nodes, over the rates at which they were simulated."""

    num_nodes: int
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    """Their places are pixels."""
    all_good: tuple[float, float]
    """Where the line on which all requests are good ends: percent, pixels."""
    enough_good: tuple[float, float]
    """And that on which just enough are."""
    now: float | None
    """The rate of the traffic; None if it is beyond this chart."""


def goodput_chart(
    candidates: Sequence[CandidateAnswer], best: str, rate: float, good_share: float
) -> GoodputChart:
    """Of candidates with as many nodes."""
    x = linear([point.rate for one in candidates for point in one.points])
    high = linear([point.goodput.high for one in candidates for point in one.points])

    def y(value: float) -> float:
        return round(PLOT_PX * (1 - high.at(value) / 100), 1)

    def end(slope: float) -> tuple[float, float]:
        to = min(x.high, high.high / slope)
        return x.at(to), y(to * slope)

    return GoodputChart(
        num_nodes=candidates[0].num_nodes,
        lines=tuple(
            Line(
                name=one.name,
                style=style,
                is_best=one.name == best,
                marks=tuple(
                    Mark(
                        x.at(point.rate),
                        y(point.goodput.value),
                        y(point.goodput.low),
                        y(point.goodput.high),
                        f"{one.name} at {words.number(point.rate)} requests/s: {words.estimate(point.goodput)} good",
                    )
                    for point in one.points
                ),
            )
            for one, style in zip(candidates, line_styles(candidates), strict=True)
        ),
        x_ticks=x.ticks(words.number),
        y_ticks=tuple(Tick(PLOT_PX * (1 - tick.at / 100), tick.text) for tick in high.ticks(words.number)),
        all_good=end(1.0),
        enough_good=end(good_share),
        now=x.at(rate) if rate <= x.high else None,
    )


def line_styles(candidates: Sequence[CandidateAnswer]) -> list[str]:
    """Fleets together differ by their dashes; a split's colour tells the share of its prefill nodes."""
    styles, num_together = [], 0
    for one in candidates:
        if one.num_prefill:
            part = (one.num_prefill - 1) / (one.num_nodes - 2) if one.num_nodes > 2 else 0.5
            styles.append(f"ramp-{round(part * (NUM_RAMP - 1))}")
        else:
            styles.append(f"together dash-{num_together % 4}")
            num_together += 1
    return styles


# --------------------------------------------------------------------------------------------------- heat map
@dataclass(frozen=True)
class Cell:
    """One candidate."""

    text: str
    heat: int
    """0 to 10."""
    is_best: bool
    tip: str


@dataclass(frozen=True)
class HeatMap:
    """P x D: a row for each number of prefill nodes, and for each way to have none."""

    columns: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def heat_map(
    candidates: Sequence[CandidateAnswer], best: str, value: Callable[[CandidateAnswer], float | None]
) -> HeatMap:
    """Of any figure; the highest is the warmest."""
    most = max((value(one) or 0.0 for one in candidates), default=0.0) or 1.0
    columns = tuple(range(1, max(one.num_decode for one in candidates) + 1))
    rows: dict[str, dict[int, Cell]] = {}
    for one in sorted(candidates, key=lambda one: one.num_prefill):
        row = f"{one.num_prefill}P" if one.num_prefill else one.name.removeprefix(f"{one.num_decode} ")
        known = value(one)
        rows.setdefault(row, {})[one.num_decode] = Cell(
            text=_cell_text(one, known),
            heat=round(10 * (known or 0.0) / most),
            is_best=one.name == best,
            tip=one.name,
        )
    return HeatMap(columns, tuple((name, tuple(map(cells.get, columns))) for name, cells in rows.items()))


def _cell_text(one: CandidateAnswer, known: float | None) -> str:
    bound, screened = "≥" if one.max_rate_is_bound else "", " *" if one.is_screened else ""
    return "none" if known is None else bound + words.short(known) + screened


# ------------------------------------------------------------------------------------------ rows of candidates
@dataclass(frozen=True)
class Bar:
    """A piece of a row."""

    x: float
    width: float
    y: float
    style: str
    tip: str


@dataclass(frozen=True)
class Dot:
    """A value of a row."""

    x: float
    style: str
    tip: str


@dataclass(frozen=True)
class Row:
    """One candidate. Its name stands above its marks, so that a long one has room on a narrow page."""

    name: str
    text: str
    """What stands at its right end."""
    is_best: bool
    height: float
    bars: tuple[Bar, ...] = ()
    dots: tuple[Dot, ...] = ()


@dataclass(frozen=True)
class RowChart:
    """Candidates below each other, on one axis."""

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    bound: Tick | None = None
    """A vertical line through all rows."""


def latency_chart(
    candidates: Sequence[CandidateAnswer],
    best: str,
    of: Callable[[Point], Distribution | None],
    bound_s: float,
) -> RowChart:
    """Percentiles at the rate of the traffic, on a logarithmic axis, with the SLO."""
    known = [found for one in candidates if (found := of(one.now)) is not None]
    scale = logarithmic([bound_s, *(value for one in known for value in (one.p50, one.p90, one.p99))])
    rows = []
    for one in candidates:
        found, is_best = of(one.now), one.name == best
        if found is None:
            rows.append(Row(one.name, "no request was served", is_best, DOTS_PX))
            continue
        dots = tuple(
            Dot(scale.at(value), name, f"{one.name}: {name} {words.seconds(value)}")
            for name, value in (("p50", found.p50), ("p90", found.p90), ("p99", found.p99))
        )
        rows.append(
            Row(one.name, words.seconds(found.p99), is_best, DOTS_PX, (_span(dots[0].x, dots[2].x),), dots)
        )
    return RowChart(
        tuple(rows), scale.ticks(words.seconds), Tick(scale.at(bound_s), f"SLO {words.seconds(bound_s)}")
    )


def stage_chart(candidates: Sequence[CandidateAnswer], best: str, slo: Slo) -> RowChart:
    """Mean seconds of each stage, stacked. A bar that is far longer than that of the best is cut at the right end."""
    totals = {one.name: sum(one.now.stages_s.values()) for one in candidates}
    most = min(max(totals.values(), default=0.0), max(3 * slo.ttft_s, 1.2 * totals.get(best, 0.0)))
    scale = linear([most])
    rows = []
    for one in candidates:
        bars, begin = [], 0.0
        for name, length in one.now.stages_s.items():
            x = scale.at(begin)
            begin += length
            style = f"stage-{name}" if name in STAGES else "stage-other"
            tip = f"{one.name}: {name} {words.seconds(length)}"
            bars.append(Bar(x, round(scale.at(begin) - x, 2), 0, style, tip))
        text = words.seconds(begin) if bars else "not known"
        is_cut = begin > scale.high
        rows.append(Row(one.name, text + (" →" if is_cut else ""), one.name == best, BAR_PX, tuple(bars)))
    return RowChart(tuple(rows), scale.ticks(words.seconds))


def use_chart(candidates: Sequence[CandidateAnswer], best: str) -> RowChart:
    """The busy share of each fleet and of the busiest link, with a mark at the fullest KV pool of each fleet."""
    scale = Scale(0.0, 1.0)
    rows = []
    for one in candidates:
        point = one.now
        shares: list[tuple[str, float, float | None]] = [
            (use.role, use.busy_share, use.pool_share) for use in point.use
        ]
        if point.transfer is not None:
            shares.append(("transfer", point.transfer.link_busy_share, None))
        bars = []
        for i, (style, busy, pool) in enumerate(shares):
            y = i * (BAR_PX + BAR_GAP_PX)
            bars.append(Bar(0.0, scale.at(busy), y, style, f"{one.name}: {style} busy {words.percent(busy)}"))
            if pool is not None:
                tip = f"{one.name}: fullest KV pool of {style} nodes {words.percent(pool)}"
                bars.append(Bar(min(scale.at(pool), 100 - POOL_MARK), POOL_MARK, y, "pool", tip))
        text = " · ".join(words.percent(busy) for _, busy, _ in shares)
        height = len(shares) * (BAR_PX + BAR_GAP_PX) - BAR_GAP_PX
        rows.append(Row(one.name, text, one.name == best, height, tuple(bars)))
    return RowChart(tuple(rows), scale.ticks(words.percent))


def difference_chart(
    candidates: Sequence[CandidateAnswer],
    best: str,
    of: Callable[[Difference], Estimate],
    text: Callable[[float], str],
) -> RowChart:
    """In a comparison: against the base, with intervals."""
    known = [(one, of(one.difference)) for one in candidates if one.difference is not None]
    widest = max((abs(end) for _, one in known for end in (one.low, one.high)), default=0.0) or 1.0
    scale = Scale(-widest * 1.1, widest * 1.1)
    rows = tuple(
        Row(
            one.name,
            text(found.value),
            one.name == best,
            DOTS_PX,
            (_span(scale.at(found.low), scale.at(found.high)),),
            (
                Dot(
                    scale.at(found.value),
                    "p50",
                    f"{one.name}: {text(found.value)} ({text(found.low)} to {text(found.high)})",
                ),
            ),
        )
        for one, found in known
    )
    return RowChart(rows, scale.ticks(text), Tick(scale.at(0.0), "as the base"))


def _span(low: float, high: float) -> Bar:
    return Bar(low, round(high - low, 2), DOTS_PX / 2 - 2, "span", "")


# ------------------------------------------------------------------------------------------------- thresholds
@dataclass(frozen=True)
class ThresholdChart:
    """Where splitting pays, on one axis."""

    title: str
    words: str
    x: float
    width: float
    now: Tick
    ends: tuple[Tick, ...]
    """Where splitting starts or ceases to pay."""
    ticks: tuple[Tick, ...]


_AXES = {
    "prompt": "Length of prompts",
    "rate": "Rate",
    "slo_ttft": "SLO on TTFT",
    "slo_itl": "SLO on ITL",
}


def threshold_chart(one: Threshold) -> ThresholdChart:
    """On a logarithmic axis."""

    def text(value: float) -> str:
        return words.seconds(value) if one.unit == "s" else words.number(value)

    scale = Scale(min(one.searched_low, one.now), max(one.searched_high, one.now), is_log=True)
    ends = [end for end in (one.pays_from, one.pays_to) if end is not None]
    low = one.searched_low if one.pays_from is None else one.pays_from
    high = one.searched_high if one.pays_to is None else one.pays_to
    x = scale.at(low)
    unit = "" if one.unit == "s" else f", {one.unit}"
    return ThresholdChart(
        title=_AXES[one.axis] + unit,
        words=one.words,
        x=x,
        width=0.0 if one.pays == "nowhere" else round(scale.at(high) - x, 2),
        now=Tick(scale.at(one.now), f"now {text(one.now)}"),
        ends=tuple(Tick(scale.at(end), text(end)) for end in ends),
        ticks=tuple(
            Tick(scale.at(end), text(end))
            for end in (scale.low, scale.high)
            if all(abs(scale.at(end) - scale.at(other)) > 20 for other in ends)
        ),
    )
