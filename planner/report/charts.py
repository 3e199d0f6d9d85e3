"""Where the marks of the report's charts go: goodput over rate, P x D, thresholds. The template draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.answer import CandidateAnswer, Threshold
from planner.report import words
from planner.report.scale import Scale, Tick, linear

PLOT_PX = 190
NUM_RAMP = 8
"""Colours of splits, from nearly all nodes for decode to nearly all for prefill."""


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
