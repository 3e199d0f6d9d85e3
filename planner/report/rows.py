"""Charts with a row for each candidate: latencies, stages, use, differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.answer import CandidateAnswer, Difference, Estimate, Point
from planner.figures import Distribution, Slo
from planner.report import words
from planner.report.scale import Scale, Tick, linear, logarithmic

DOTS_PX = 12
BAR_PX = 10
BAR_GAP_PX = 4
POOL_MARK = 0.7
"""Percent of the width."""

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
