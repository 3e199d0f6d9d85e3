"""The answer of `router plan` as one HTML file that loads nothing: the table, and a drawing of its figures.

The table is that of a terminal, matplotlib draws, and the SVG stands in the page itself.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from itertools import groupby
from operator import attrgetter
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from planner.answer import Answer, CandidateAnswer
from planner.table import print_answer

WIDTH_IN, ROW_IN, PLOT_IN = 9.0, 0.24, 3.2
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>svg {{ max-width: 100%; height: auto }}</style>
<pre>{table}</pre>
{drawing}
"""


def html_of(answer: Answer) -> bytes:
    """The page."""
    console = Console(record=True, file=io.StringIO(), width=160, highlight=False)
    print_answer(answer, console)
    title, table = f"Plan: {escape(answer.verdict.best)}", escape(console.export_text())
    return _PAGE.format(title=title, table=table, drawing=draw(answer)).encode("utf-8", "backslashreplace")


def draw(answer: Answer) -> str:
    """All charts below each other, as one SVG element."""
    num_nodes = attrgetter("num_nodes")
    shown = sorted(answer.candidates, key=num_nodes)
    by_nodes = [list(of) for _, of in groupby(shown, key=num_nodes)]
    heights = [PLOT_IN] * len(by_nodes) + [ROW_IN * len(shown) + 0.6] * 2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        axes = iter(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
        for candidates in by_nodes:
            _goodput(next(axes), answer, candidates)
        slo = answer.question.slo
        _latencies(next(axes), "Time to first token, s", shown, "ttft_s", slo.ttft_s)
        _latencies(next(axes), "Time between tokens, s", shown, "itl_s", slo.itl_s)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _goodput(axes: Axes, answer: Answer, candidates: Sequence[CandidateAnswer]) -> None:
    """Of fleets with as many nodes, over the rates at which they were simulated."""
    for one in candidates:
        rates = [point.rate for point in one.points]
        goods = [point.rate * point.good_share.value for point in one.points]
        style, width = "-" if one.num_prefill else "--", 2.2 if one.name == answer.verdict.best else 1
        axes.plot(rates, goods, style, label=one.name, marker=".", linewidth=width)
        lows, highs = (
            [point.rate * getattr(point.good_share, end) for point in one.points] for end in ("low", "high")
        )
        axes.fill_between(rates, lows, highs, alpha=0.1)
    most = max(point.rate for one in candidates for point in one.points)
    axes.plot([0, most], [0, most], color="grey", linewidth=0.8)
    axes.plot([0, most], [0, answer.question.good_share * most], color="grey", linewidth=0.8, linestyle=":")
    axes.axvline(answer.question.traffic.rate, color="black", linewidth=0.8, linestyle=":")
    axes.set(
        title=f"{candidates[0].num_nodes} nodes: good requests/s",
        xlabel="requests/s; the traffic's own rate is dotted",
    )
    axes.legend(ncols=2)


def _latencies(axes: Axes, title: str, shown: Sequence[CandidateAnswer], field: str, bound_s: float) -> None:
    """Percentiles at the rate of the traffic, with the SLO."""
    for row, one in enumerate(shown):
        found = getattr(one.now, field)
        if found is not None:
            axes.plot([found.p50, found.p90, found.p99], [row] * 3, marker="|", color="C0")
    axes.axvline(bound_s, color="black", linewidth=0.8, linestyle=":")
    axes.set(title=f"{title}: p50, p90, p99; the SLO is dotted", xscale="log")
    axes.set_yticks(range(len(shown)), [one.name for one in shown])
    axes.invert_yaxis()
