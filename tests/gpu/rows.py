"""What a step reports: rows, which become the one table of a run and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

NOTE_CHARS = 76


class Verdict(StrEnum):
    """What a row says. Only `FAIL` makes the exit code of a run 1."""

    PASS = "pass"
    FAIL = "FAIL"
    SKIP = "skip"
    MEASURED = ""
    """A figure without a target, or of a dry run."""
    MET = "met"
    MISSED = "missed"


_WORST_FIRST = (Verdict.FAIL, Verdict.MISSED, Verdict.SKIP, Verdict.MET, Verdict.PASS, Verdict.MEASURED)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case of a check, or one figure. Rows of a step with the same `what` share a line of the table."""

    what: str
    verdict: Verdict
    note: str = ""
    """Why it failed or was skipped, or what a figure was computed from."""
    value: float | str | None = None
    unit: str = ""
    target: str = ""
    seconds: float | None = None
    more: dict[str, Any] | None = None
    """Further figures, for the JSON alone."""

    def as_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Row:
        """The row of `as_json`."""
        fields = json.loads(line)
        return cls(**{**fields, "verdict": Verdict(fields["verdict"])})


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on a figure: at least so much, or at most."""

    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"

    def is_met(self, value: float) -> bool:
        """Whether `value` keeps the bound. No number keeps one that is NaN."""
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most


def figure(
    what: str,
    value: float | str,
    unit: str = "",
    *,
    target: Target | None = None,
    note: str = "",
    **more: Any,
) -> Row:
    """A measured figure; `more` is kept in the JSON alone."""
    verdict = Verdict.MEASURED
    if target is not None:
        assert isinstance(value, float)
        verdict = Verdict.MET if target.is_met(value) else Verdict.MISSED
    shown = target is not None and str(target)
    return Row(
        what=what, verdict=verdict, note=note, value=value, unit=unit, target=shown or "", more=more or None
    )


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Rows with the names of their steps, as aligned columns. Cases of one check are counted on one line."""
    cells = [("step", "what", "result", "value", "target", "s", "note")]
    for step, of_step in groupby(rows, key=lambda pair: pair[0]):
        by_what: dict[str, list[Row]] = {}
        for _, row in of_step:
            by_what.setdefault(row.what, []).append(row)
        cells += [(step, what, *_line(group)) for what, group in by_what.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The one that needs to be looked at most."""
    return min(verdicts, key=_WORST_FIRST.index)


def _line(rows: Sequence[Row]) -> tuple[str, str, str, str, str]:
    verdict = worst(row.verdict for row in rows)
    told = [row for row in rows if row.verdict is verdict]
    seconds = [row.seconds for row in rows if row.seconds is not None]
    note = told[0].note.splitlines()[0] if told[0].note else ""
    if len(rows) > 1:
        count = f"{len(told)} of {len(rows)}" if len(told) < len(rows) else f"{len(rows)}"
        note = f"{count} cases{': ' if note else ''}{note}"
    value = told[0].value if len(rows) == 1 else None
    shown = "" if value is None else f"{_number(value)} {told[0].unit}".rstrip()
    if len(note) > NOTE_CHARS:
        note = f"{note[: NOTE_CHARS - 2]}.."
    return verdict, shown, told[0].target, f"{sum(seconds):.1f}" if seconds else "", note


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
