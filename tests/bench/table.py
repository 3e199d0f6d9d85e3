"""How every bench reports: a table to read on stderr, and one JSON object a line on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Row = Mapping[str, Any]
FIRST_WORDS = 4
"""So many fields tell which row of a table one is."""


def report(figures: Iterable[Row]) -> list[Row]:
    """Print figures, and return them; those that follow each other and have the same keys share a table."""
    reported: list[Row] = []
    for _, group in groupby(_told(figures), key=lambda figure: (figure["bench"], tuple(figure))):
        rows = list(group)
        print(table(rows), file=sys.stderr, flush=True)
        for row in rows:
            print(json.dumps(row), flush=True)
        reported += rows
    return reported


def _told(figures: Iterable[Row]) -> Iterator[Row]:
    """The same, each said in a line when it comes: a table is printed when it is complete, after minutes for some."""
    start = time.perf_counter()
    for number, row in enumerate(figures, 1):
        first = [f"{key} {_text(value)}" for key, value in row.items() if key != "bench"][:FIRST_WORDS]
        seconds = time.perf_counter() - start
        print(
            f"{row['bench']}: row {number} after {seconds:.0f} s: {', '.join(first)}",
            file=sys.stderr,
            flush=True,
        )
        yield row


def table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as aligned columns. What is the same in all of them stands above."""
    keys = [key for key in rows[0] if key != "bench"]
    same = [key for key in keys if len(rows) > 1 and all(row[key] == rows[0][key] for row in rows)]
    columns = [key for key in keys if key not in same]
    cells = [columns, *([_text(row[key]) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"\n{rows[0]['bench']}  " + ", ".join(f"{key} {_text(rows[0][key])}" for key in same)]
    lines += ["  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def _text(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case [least, most]:
            return f"{least}..{most}"
    return str(value)
