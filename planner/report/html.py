"""The answer of `router plan` as one HTML file that loads nothing: no script, no font, no image, no other file.

    Answer ──charts──▶ places of marks ──report.html.jinja──▶ one file, with theme.css of the router's page in it

Its Content-Security-Policy forbids every load and every script; the one style sheet is let in by its hash.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import jinja2

from planner.answer import Answer, CandidateAnswer
from planner.profile import Measured
from planner.report import charts, rows, words
from shared.errors import ConfigError


def write_html(answer: Answer, path: Path) -> None:
    """Write the report. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(to_html(answer), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def to_html(answer: Answer) -> str:
    """The report."""
    style = "\n".join(
        files(package).joinpath(name).read_text(encoding="utf-8")
        for package, name in (("router", "page/theme.css"), ("planner.report", "report.css"))
    )
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _template().render(
        answer=answer,
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        best=answer.candidate(answer.verdict.best),
        has_prices=any(one.price is not None for one in answer.candidates),
        misfit=_misfit,
        stages=rows.STAGES,
        **(_comparison(answer) if answer.base is not None else _plan(answer)),
        **_rows(answer, _shown(answer)),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("planner.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for show in (
        words.number,
        words.short,
        words.seconds,
        words.percent,
        words.count,
        words.estimate,
        words.share,
        words.signed,
        words.signed_seconds,
        words.bytes_s,
    ):
        environment.filters[show.__name__] = show
    environment.globals.update(PLOT_PX=charts.PLOT_PX, BAR_PX=rows.BAR_PX)
    return environment.get_template("report.html.jinja")


def _plan(answer: Answer) -> dict[str, object]:
    """The charts of the search for the best fleet."""
    best, asked = answer.verdict.best, answer.question
    by_nodes = sorted(answer.candidates, key=lambda one: one.num_nodes)
    maps = [("Requests/s within the SLOs", charts.heat_map(answer.candidates, best, _max_rate))]
    if any(one.price is not None for one in answer.candidates):
        of_price = charts.heat_map(answer.candidates, best, lambda one: one.goodput_a_price)
        maps.append(("Good requests for one unit of the price", of_price))
    else:
        of_node = charts.heat_map(answer.candidates, best, _max_rate_of_node)
        maps.append(("Requests/s within the SLOs, for each node", of_node))
    return {
        "goodput": [
            charts.goodput_chart(tuple(fleets), best, asked.traffic.rate, asked.good_share)
            for _, fleets in groupby(by_nodes, key=lambda one: one.num_nodes)
        ],
        "maps": maps,
        "differences": [],
        "thresholds": [charts.threshold_chart(one) for one in answer.thresholds],
    }


def _comparison(answer: Answer) -> dict[str, object]:
    """The charts of settings of one fleet, all at one rate."""
    kinds = (
        ("Goodput, requests/s", lambda one: one.goodput, words.signed),
        ("Mean TTFT", lambda one: one.ttft_mean_s, words.signed_seconds),
        ("Mean ITL", lambda one: one.itl_mean_s, words.signed_seconds),
    )
    differences = [
        (title, rows.difference_chart(answer.candidates, answer.verdict.best, of, text))
        for title, of, text in kinds
    ]
    return {"goodput": [], "maps": [], "differences": differences, "thresholds": []}


def _rows(answer: Answer, shown: Sequence[CandidateAnswer]) -> dict[str, object]:
    """The charts of some candidates at the rate of the traffic."""
    best, slo = answer.verdict.best, answer.question.slo
    return {
        "shown": shown,
        "latencies": (
            ("Time to first token", rows.latency_chart(shown, best, lambda one: one.ttft_s, slo.ttft_s)),
            ("Inter-token latency", rows.latency_chart(shown, best, lambda one: one.itl_s, slo.itl_s)),
        ),
        "start": rows.stage_chart(shown, best, slo),
        "used_stages": [
            name for name in rows.STAGES if any(one.now.stages_s.get(name, 0.0) > 0 for one in shown)
        ],
        "use": rows.use_chart(shown, best),
    }


def _shown(answer: Answer) -> list[CandidateAnswer]:
    """For each number of nodes the best split and the best fleet together; in a comparison every setting."""
    if answer.base is not None:
        return list(answer.candidates)
    named = {one.name for one in answer.verdict.best_of}
    kinds: dict[tuple[int, bool], list[CandidateAnswer]] = {}
    for one in answer.candidates:
        kinds.setdefault((one.num_nodes, one.num_prefill > 0), []).append(one)

    def rank(one: CandidateAnswer) -> tuple[bool, bool, float, float]:
        return one.name == answer.verdict.best, one.name in named, *_merit(one)

    return [max(kind, key=rank) for _, kind in sorted(kinds.items())]


def _merit(one: CandidateAnswer) -> tuple[float, float]:
    factor = one.now.slo_factor
    return _max_rate(one) or 0.0, -float("inf") if factor is None else -factor


def _max_rate(one: CandidateAnswer) -> float | None:
    return None if one.max_rate is None else one.max_rate.value


def _max_rate_of_node(one: CandidateAnswer) -> float | None:
    return None if one.max_rate is None else one.max_rate.value / one.num_nodes


def _misfit(measured: Measured) -> float | None:
    """By what share of the measured time the fit is off at most; None if the profile does not tell."""
    return max((abs(one.error) for one in measured.residuals), default=None)
