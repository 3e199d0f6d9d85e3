"""The page of charts of a plan."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from planner.answer import Answer
from planner.charts import draw, write_html
from shared.errors import ConfigError
from tests.unit.planner.answers import comparison_answer, plan_answer


def texts(answer: Answer) -> list[str]:
    """What is written in the drawing."""
    return [element.text or "" for element in ElementTree.fromstring(draw(answer)).iter() if element.text]


def without_figures(answer: Answer) -> Answer:
    """The same candidates, none of which served a request."""
    return replace(
        answer,
        candidates=tuple(
            replace(
                one,
                max_rate=None,
                points=tuple(replace(p, ttft_s=None, itl_s=None, stages_s={}) for p in one.points),
            )
            for one in answer.candidates
        ),
    )


def test_a_plan_has_a_chart_for_each_number_of_nodes() -> None:
    answer = plan_answer(max_nodes=3)
    drawn = texts(answer)
    assert {f"{num} nodes: good requests/s" for num in (1, 2, 3)} <= set(drawn)
    assert {one.name for one in answer.candidates} <= set(drawn)


def test_a_comparison_has_the_differences_from_its_base() -> None:
    answer = comparison_answer()
    drawn = texts(answer)
    assert sum("from the base" in text for text in drawn) == 3
    assert {one.name for one in answer.candidates} <= set(drawn)


def test_an_answer_without_figures_is_drawn() -> None:
    assert texts(without_figures(plan_answer()))


def test_the_page_loads_nothing_and_has_the_table(tmp_path: Path) -> None:
    answer = plan_answer(source="{a} <b>\udcff.jsonl")
    write_html(answer, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.search(r"""(src|href|action)=["'](?!#)|url\((?!#)|@import""", page)
    assert "{a} &lt;b&gt;\\udcff.jsonl" in page
    assert answer.verdict.headline.split()[0] in page and "<svg" in page


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/plan\.html"):
        write_html(plan_answer(), tmp_path / "nowhere" / "plan.html")
