"""How every bench reports: a table to read on stderr, and one JSON object a line on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

Row = Mapping[str, Any]


def report(figures: Iterable[Row]) -> list[Row]:
    """Print figures, and return them; those that follow each other and have the same keys share a table."""
    reported: list[Row] = []
    for _, group in groupby(figures, key=lambda figure: (figure["bench"], tuple(figure))):
        rows = list(group)
        print(table(rows), file=sys.stderr, flush=True)
        for row in rows:
            print(json.dumps(row), flush=True)
        reported += rows
    return reported


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
