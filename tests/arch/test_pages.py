"""Links between pages lead somewhere, and every decision has a number of its own."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md"))
    if not path.is_symlink()
)
ADRS = sorted((ROOT / "docs" / "adr").glob("0*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_decision_has_a_number_of_its_own() -> None:
    numbers = [path.name[:4] for path in ADRS]
    assert [number for number, count in Counter(numbers).items() if count > 1] == []


@pytest.mark.parametrize("adr", ADRS, ids=[path.name for path in ADRS])
def test_a_decision_is_listed_under_its_number(adr: Path) -> None:
    title = adr.read_text().splitlines()[0]
    assert title.startswith(f"# {int(adr.name[:4])}. ")
    assert f"]({adr.name})" in (ROOT / "docs" / "adr" / "README.md").read_text()


def test_a_reference_names_the_number_that_it_links_to() -> None:
    for page in PAGES:
        for number, file in re.findall(r"\[ADR\s+(\d+)\]\((?:[\w./]*/)?(\d{4})-", page.read_text()):
            assert int(number) == int(file), page
