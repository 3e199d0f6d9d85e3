"""The README's reading list is true: every path exists and has about as many lines as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ((?:`[\w/.]+` ?)+) \| (\d+) \|", re.MULTILINE)
ROWS = ROW.findall((ROOT / "README.md").read_text())
TOLERANCE = 0.1


def num_lines(path: Path) -> int:
    """Of a file, or of all Python in a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text().splitlines()) for file in files)


def test_there_is_a_reading_list() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize(("paths", "told"), ROWS, ids=[row[0] for row in ROWS])
def test_line_counts_are_about_right(paths: str, told: str) -> None:
    counted = sum(num_lines(ROOT / path) for path in re.findall(r"`(.+?)`", paths))
    assert abs(counted - int(told)) <= TOLERANCE * counted, (
        f"{paths}: {counted} lines, the README says {told}"
    )
