"""The answer of `router plan` as one HTML file that loads nothing: the table, and a drawing of its figures.

Rich exports the table that a terminal shows, matplotlib draws; the SVG stands in the page itself.
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
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{{stylesheet}} svg {{{{ max-width: 100%; height: auto }}}}</style>
<pre>{{code}}</pre>
{drawing}
"""
"""What rich fills in has one pair of braces, the rest is filled in before."""


def html_of(answer: Answer) -> bytes:
    """The page."""
    console = Console(record=True, file=io.StringIO(), width=160, highlight=False)
    print_answer(answer, console)
    drawing = draw(answer).replace("{", "{{").replace("}", "}}")
    page = _PAGE.format(title=f"Plan: {escape(answer.verdict.best)}", drawing=drawing)
    text = console.export_html(code_format=page, inline_styles=True)
    return text.encode("utf-8", "backslashreplace")


def draw(answer: Answer) -> str:
    """All charts below each other, as one SVG element."""
    num_nodes = attrgetter("num_nodes")
    by_nodes = [list(of) for _, of in groupby(sorted(answer.candidates, key=num_nodes), key=num_nodes)]
    shown = _shown(answer)
    heights = [PLOT_IN] * len(by_nodes) + [ROW_IN * len(shown) + 0.6] * 3
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        axes = iter(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
        for candidates in by_nodes:
            _goodput(next(axes), answer, candidates)
        slo = answer.question.slo
        _latencies(next(axes), "Time to first token, s", shown, "ttft_s", slo.ttft_s)
        _latencies(next(axes), "Time between tokens, s", shown, "itl_s", slo.itl_s)
        _stages(next(axes), shown)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _shown(answer: Answer) -> list[CandidateAnswer]:
    """Of each number of nodes the best split and the best fleet together."""
    kinds: dict[tuple[int, bool], CandidateAnswer] = {}
    ascending = sorted(answer.candidates, key=lambda one: one.max_rate.value if one.max_rate else 0.0)
    for one in sorted(ascending, key=lambda one: one.name == answer.verdict.best):
        kinds[one.num_nodes, one.num_prefill > 0] = one
    return [one for _, one in sorted(kinds.items())]


def _goodput(axes: Axes, answer: Answer, candidates: Sequence[CandidateAnswer]) -> None:
    """Of fleets with as many nodes, over the rates at which they were simulated."""
    for one in candidates:
        rates, goodputs = [point.rate for point in one.points], [point.goodput for point in one.points]
        axes.errorbar(
            rates,
            [goodput.value for goodput in goodputs],
            yerr=[[one.value - one.low for one in goodputs], [one.high - one.value for one in goodputs]],
            label=one.name,
            marker=".",
            capsize=2,
            linestyle="-" if one.num_prefill else "--",
            linewidth=2.2 if one.name == answer.verdict.best else 1,
        )
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
    _name_rows(axes, shown)


def _stages(axes: Axes, shown: Sequence[CandidateAnswer]) -> None:
    """Mean seconds of each stage of a request up to its second token."""
    names = dict.fromkeys(name for one in shown for name, seconds in one.now.stages_s.items() if seconds > 0)
    ends = [0.0] * len(shown)
    for name in names:
        seconds = [one.now.stages_s.get(name, 0.0) for one in shown]
        axes.barh(range(len(shown)), seconds, left=ends, label=name)
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    axes.set(title="Where the start of a request goes, mean s")
    if names:
        axes.legend(ncols=4)
    _name_rows(axes, shown)


def _name_rows(axes: Axes, shown: Sequence[CandidateAnswer]) -> None:
    axes.set_yticks(range(len(shown)), [one.name for one in shown])
    axes.invert_yaxis()
