"""The HTML report of a plan."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from planner.answer import Answer, CandidateAnswer
from planner.candidate import Candidate
from planner.report.charts import goodput_chart, heat_map, line_styles, threshold_chart
from planner.report.html import to_html, write_html
from planner.report.rows import latency_chart, stage_chart
from planner.report.scale import Scale
from planner.report.words import number, percent, seconds, short
from shared.errors import ConfigError
from tests.unit.planner.answers import LOADS, RATE, SLO, candidate, comparison_answer, plan_answer
from tests.unit.planner.plan_rig import asked, planted

LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}
EMPTY = {"meta", "br"}


class Seen(HTMLParser):
    """A page's elements with their attributes, its words, and its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def seen(answer: Answer) -> Seen:
    page = Seen(to_html(answer))
    assert page.open == []
    return page


def nothing_served(one: CandidateAnswer) -> CandidateAnswer:
    points = tuple(
        replace(
            point,
            num_failed=point.num_reqs,
            goodput=replace(point.goodput, value=0.0, low=0.0, high=0.0),
            good_share=replace(point.good_share, value=0.0, low=0.0, high=0.0),
            slo_factor=None,
            ttft_s=None,
            itl_s=None,
            stages_s={},
        )
        for point in one.points
    )
    return replace(one, points=points, max_rate=None, goodput_a_price=None)


@pytest.mark.parametrize("answer", [plan_answer(), plan_answer(price=2.5), comparison_answer()])
def test_it_loads_nothing(answer: Answer) -> None:
    page = seen(answer)
    assert {"script", "link", "img", "iframe", "object", "image", "use"}.isdisjoint(
        name for name, _ in page.elements
    )
    for name, attrs in page.elements:
        assert not LOADING & set(attrs), name
        assert "style" not in attrs, f"{name}: the policy forbids it"
        assert not any(attr.startswith("on") for attr in attrs), name
    html = to_html(answer)
    assert "url(" not in html
    assert "@import" not in html
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (policy,) = [
        meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_the_verdict_comes_first() -> None:
    answer = plan_answer(best="2 together")
    page = seen(answer)
    assert "Do not split: 2 together" in page.text
    at = page.text.index(answer.verdict.headline)
    assert all(at < page.text.index(words) for words in (*answer.verdict.reasons, *answer.remarks))
    assert page.text.index(answer.remarks[0]) < page.text.index("Goodput over rate")


@pytest.mark.parametrize(
    "answer", [plan_answer(max_nodes=8), comparison_answer()], ids=["plan", "comparison"]
)
def test_every_candidate_is_in_it_at_every_rate(answer: Answer) -> None:
    rows = seen(answer).rows
    for one in answer.candidates:
        for point in one.points:
            asked = [one.name, number(point.rate), f"× {number(point.load)}"]
            (row,) = [row for row in rows if row[:3] == asked]
            assert row[-1] == point.bottleneck
            assert row[8] == seconds(point.ttft_s.p99 if point.ttft_s else None)


def test_each_size_has_a_chart_with_every_candidate_in_it() -> None:
    answer = plan_answer(max_nodes=5)
    page = seen(answer)
    lines = page.of("polyline")
    assert len(lines) == len(answer.candidates)
    assert all(len((attrs["points"] or "").split()) == len(LOADS) for attrs in lines)
    titles = [f"Goodput over rate with {num} node{'s' if num > 1 else ''}" for num in range(1, 6)]
    assert all(title in page.text for title in titles)


def test_rows_are_of_the_best_split_and_the_best_fleet_together() -> None:
    page = Seen(to_html(plan_answer(max_nodes=3, best="3 together, mixed chunks")))
    latency = [
        attrs["aria-label"] or ""
        for attrs in page.of("svg")
        if attrs.get("role") == "img" and "aria-label" in attrs
    ]
    rows = [
        label.removeprefix("Time to first token of ").split(":")[0]
        for label in latency
        if "first token" in label
    ]
    assert rows == ["1 together", "2 together", "1P1D", "3 together, mixed chunks", "2P1D"]


def test_thresholds_and_sensitivity_are_told() -> None:
    answer = plan_answer()
    page = seen(answer)
    assert all(one.words in page.text for one in answer.thresholds)
    assert [
        row[:2] for row in page.rows if row[0] in ("load -20 %", "load +20 %", "cost -20 %", "cost +20 %")
    ] == [
        ["load -20 %", "1P1D"],
        ["load +20 %", "1P1D"],
        ["cost -20 %", "1P1D"],
        ["cost +20 %", "1P1D"],
    ]


def test_an_image_says_what_it_shows() -> None:
    ids = re.findall(r' id="([^"]+)"', to_html(plan_answer()))
    assert len(ids) == len(set(ids))
    images = [attrs for attrs in seen(plan_answer()).of("svg") if attrs.get("role") == "img"]
    assert images
    for attrs in images:
        labels = (attrs.get("aria-labelledby") or "").split()
        assert attrs.get("aria-label") or labels
        assert set(labels) <= set(ids)


def test_names_from_files_stay_text() -> None:
    evil = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
    plain = plan_answer(source=evil)
    candidates = (*plain.candidates, candidate(Candidate(num_prefill=1, num_decode=2), name=evil))
    machines = tuple(
        replace(machine, profile=evil, measured=replace(machine.measured, machine=evil, model=evil))
        for machine in plain.question.machines
    )
    verdict = replace(plain.verdict, headline=evil, reasons=(evil,), best=evil)
    answer = replace(
        plain,
        candidates=candidates,
        remarks=(evil,),
        verdict=verdict,
        question=replace(plain.question, machines=machines),
    )
    page = seen(answer)
    assert page.of("script") == page.of("img") == []
    assert page.text.count(evil) > 10
    assert not any("onerror" in attrs for _, attrs in page.elements)


def test_one_candidate_alone() -> None:
    plain = plan_answer(max_nodes=1, best="1 together")
    answer = replace(plain, candidates=plain.candidates[:1], thresholds=(), sensitivity=(), remarks=())
    page = seen(answer)
    assert "What makes this doubtful" not in page.text
    assert "From where on splitting pays" not in page.text
    assert len(page.of("polyline")) == 1


def test_no_goodput_at_all() -> None:
    plain = plan_answer(price=2.5)
    verdict = replace(plain.verdict, meets=False, headline="None of these fleets meets the SLOs.")
    answer = replace(plain, candidates=tuple(map(nothing_served, plain.candidates)), verdict=verdict)
    page = seen(answer)
    assert "None of these fleets meets the SLOs." in page.text
    assert page.text.count("no request was served") >= 2 * 7
    assert "nan" not in page.text
    assert "inf" not in page.text
    assert not any("nan" in (value or "") for _, attrs in page.elements for value in attrs.values())


def test_an_answer_of_the_search_is_shown() -> None:
    """Where the simulation tells no stages."""
    answer = planted(asked(), lambda fleet, varied: 0.4 * fleet.num_nodes)
    page = seen(answer)
    assert answer.verdict.headline in page.text
    assert "1P1D not known" in page.text
    assert all(one.words in page.text for one in answer.thresholds)


def test_a_fleet_of_nodes_that_do_both_has_no_links() -> None:
    plain = plan_answer(best="2 together")
    answer = replace(plain, candidates=tuple(one for one in plain.candidates if not one.num_prefill))
    page = seen(answer)
    rows = [row for row in page.rows if row[1:2] == ["together"]]
    assert len(rows) == 8
    assert all(row[6:8] == ["–", "–"] for row in rows)


def test_with_prices_the_map_is_of_what_a_price_buys() -> None:
    with_prices, without = seen(plan_answer(price=2.5)).text, seen(plan_answer()).text
    assert "Good requests for one unit of the price" in with_prices
    assert "Price of an hour5" in with_prices
    assert "rice" not in without


def test_a_comparison_shows_differences_from_its_base() -> None:
    answer = comparison_answer()
    page = seen(answer)
    assert f"Differences from {answer.base}" in page.text
    assert "Prefill nodes by decode nodes" not in page.text
    (row,) = [
        row for row in page.rows if row[0] == answer.candidates[2].name and row[-1] == "more than noise"
    ]
    assert row[1:4] == ["+0.4 (+0.1 to +0.7)", *2 * ["+400 ms (+100 ms to +700 ms)"]]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_html(plan_answer(), tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match=r"nowhere/plan\.html: No such file"):
        write_html(plan_answer(), tmp_path / "nowhere" / "plan.html")


def test_a_name_that_is_no_utf_8_is_written(tmp_path: Path) -> None:
    write_html(plan_answer(source="trace\udcff.jsonl"), tmp_path / "plan.html")
    assert "trace\\udcff.jsonl" in (tmp_path / "plan.html").read_text()


# ----------------------------------------------------------------------------------------------- the charts
def test_goodput_is_drawn_where_it_is() -> None:
    fleet = candidate(Candidate(num_prefill=0, num_decode=2), loads=(1.0, 2.0))
    chart = goodput_chart([fleet], fleet.name, RATE, 0.9)
    (line,) = chart.lines
    first, second = fleet.points
    assert chart.x_ticks[-1].text == "20"
    assert [mark.x for mark in line.marks] == [45.0, 90.0]
    top = float(chart.y_ticks[-1].text)
    for mark, point in zip(line.marks, (first, second), strict=True):
        assert mark.y == pytest.approx(190 * (1 - point.goodput.value / top), abs=0.1)
        assert mark.high < mark.y < mark.low
    assert chart.now == 45.0
    assert goodput_chart([fleet], fleet.name, 100.0, 0.9).now is None


def test_colours_follow_the_share_of_prefill_nodes() -> None:
    splits = [candidate(Candidate(num_prefill=p, num_decode=9 - p)) for p in range(1, 9)]
    assert line_styles(splits) == [f"ramp-{at}" for at in range(8)]


def test_the_map_has_a_cell_for_each_candidate() -> None:
    answer = plan_answer(max_nodes=3)
    found = heat_map(answer.candidates, "2P1D", lambda one: one.max_rate.value if one.max_rate else None)
    assert found.columns == (1, 2, 3)
    assert [name for name, _ in found.rows] == ["together", "together, mixed chunks", "1P", "2P"]
    cells = dict(found.rows)
    assert [cell.text if cell else None for cell in cells["1P"]] == ["10.5", "10.5", None]
    best = cells["2P"][0]
    assert best is not None
    assert best.is_best
    assert best.heat == 10


def test_a_cell_says_how_far_its_figure_holds() -> None:
    fleet = candidate(Candidate(num_prefill=1, num_decode=1))
    texts = []
    for one in (
        replace(fleet, is_screened=True),
        replace(fleet, max_rate_is_bound=True),
        nothing_served(fleet),
    ):
        ((_, (cell,)),) = heat_map([one], "", lambda one: one.max_rate.value if one.max_rate else None).rows
        assert cell is not None
        texts.append(cell.text)
    assert texts == ["10.5 *", "≥10.5", "none"]


def test_a_bar_far_longer_than_the_best_one_is_cut() -> None:
    good = candidate(Candidate(num_prefill=0, num_decode=2))
    slow = candidate(Candidate(num_prefill=0, num_decode=1))
    stages = {**slow.points[1].stages_s, "queue": 100.0}
    slow = replace(slow, points=tuple(replace(point, stages_s=stages) for point in slow.points))
    rows = stage_chart([slow, good], good.name, SLO).rows
    assert rows[0].text == "100 s →"
    assert sum(bar.width for bar in rows[0].bars) == pytest.approx(100)
    assert "→" not in rows[1].text


def test_percentiles_and_the_slo_share_an_axis() -> None:
    one = candidate(Candidate(num_prefill=1, num_decode=1))
    chart = latency_chart([one], one.name, lambda point: point.ttft_s, SLO.ttft_s)
    (row,) = chart.rows
    assert one.now.ttft_s is not None
    assert chart.bound is not None
    assert [dot.x < chart.bound.at for dot in row.dots] == [
        value < SLO.ttft_s for value in (one.now.ttft_s.p50, one.now.ttft_s.p90, one.now.ttft_s.p99)
    ]


def test_a_threshold_fills_where_splitting_pays() -> None:
    prompt, rate, ttft, itl = map(threshold_chart, plan_answer().thresholds)
    assert [end.text for end in prompt.ends] == ["900"]
    assert (prompt.x, prompt.x + prompt.width) == (pytest.approx(29.6, abs=0.1), 100.0)
    assert [end.text for end in rate.ends] == ["6.5", "12.5"]
    assert rate.x < rate.now.at < rate.x + rate.width < 100
    assert (ttft.ends, ttft.width) == ((), 0.0)
    assert (itl.ends, itl.x, itl.width) == ((), 0.0, 100.0)


@pytest.mark.parametrize(
    ("scale", "texts"),
    [
        (Scale(0.0, 40.0), ["0", "10", "20", "30", "40"]),
        (Scale(-0.7, 0.7), ["-0.5", "0", "0.5"]),
        (Scale(0.08, 1.3, is_log=True), ["0.1", "0.2", "0.5", "1"]),
        (Scale(0.0077, 0.0187, is_log=True), ["0.01", "0.015"]),
        (Scale(0.009, 120.0, is_log=True), ["0.01", "0.1", "1", "10", "100"]),
    ],
)
def test_ticks_are_round(scale: Scale, texts: list[str]) -> None:
    ticks = scale.ticks(number)
    assert [tick.text for tick in ticks] == texts
    assert all(0 <= tick.at <= 100 for tick in ticks)


def test_figures_as_words() -> None:
    assert [number(value) for value in (0, 0.01234, 9.04, 123.4, 12345.6)] == [
        "0",
        "0.0123",
        "9.04",
        "123",
        "12,346",
    ]
    assert [short(value) for value in (9.04, 8165, 12345, 3.4e6, 2e9)] == [
        "9.04",
        "8,165",
        "12.3k",
        "3.4M",
        "2G",
    ]
    assert [seconds(value) for value in (None, 0, 0.0123, 0.4, 1.25, 100)] == [
        *("–", "0 s", "12.3 ms", "400 ms", "1.25 s", "100 s")
    ]
    assert [percent(value) for value in (0, 0.0001, 0.5, 0.9999, 1)] == [
        "0 %",
        "0.1 %",
        "50 %",
        "99.9 %",
        "100 %",
    ]
