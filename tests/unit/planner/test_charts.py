"""The page of charts of a plan."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from planner.answer import Answer
from planner.charts import draw, html_of
from tests.unit.planner.plan_rig import asked, planted, traffic


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Of fleets of one to three nodes, of which each node serves a request a second."""
    return planted(asked(of=traffic(rate=2.6), nodes=range(1, 4)), lambda fleet: fleet.num_nodes)


def texts(answer: Answer) -> list[str]:
    """What is written in the drawing."""
    return [element.text or "" for element in ElementTree.fromstring(draw(answer)).iter() if element.text]


def test_a_plan_has_a_chart_for_each_number_of_nodes(answer: Answer) -> None:
    drawn = texts(answer)
    assert {f"{num} nodes: good requests/s" for num in (1, 2, 3)} <= set(drawn)
    assert {one.name for one in answer.candidates} <= set(drawn)


def test_an_answer_without_figures_is_drawn(answer: Answer) -> None:
    empty = tuple(
        replace(one, max_rate=None, points=tuple(replace(p, ttft_s=None, itl_s=None) for p in one.points))
        for one in answer.candidates
    )
    assert texts(replace(answer, candidates=empty))


def test_the_page_loads_nothing_and_has_the_table(answer: Answer) -> None:
    question = answer.question
    traffic_ = replace(question.traffic, source="{a} <b>\udcff.jsonl")
    page = html_of(replace(answer, question=replace(question, traffic=traffic_))).decode()
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.search(r"""(src|href|action)=["'](?!#)|url\((?!#)|@import""", page)
    assert "{a} &lt;b&gt;\\udcff.jsonl" in page
    assert answer.verdict.headline.split()[0] in page and "<svg" in page
