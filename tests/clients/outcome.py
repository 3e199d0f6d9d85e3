"""What came of a client, and the table of docs/clients.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- results: written by make test-clients -->", "<!-- end of results -->"
HEAD = ("client", "version", "what is checked", "result", "time", "day")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One client's run. `errors` holds what failed, by check; empty when all `num_checks` passed."""

    client: str
    version: str
    proves: str
    num_checks: int
    errors: tuple[str, ...]
    seconds: float
    day: str

    @property
    def passed(self) -> bool:
        """True when something was checked and nothing failed."""
        return self.num_checks > 0 and not self.errors

    @property
    def result(self) -> str:
        """For the table."""
        if self.passed:
            return f"pass ({self.num_checks} checks)"
        return f"FAIL ({len(self.errors)} failed, {self.num_checks} checks)"

    def row(self) -> tuple[str, ...]:
        """Its cells under HEAD."""
        return self.client, self.version, self.proves, self.result, f"{self.seconds:.0f} s", self.day


def write_table(path: Path, outcomes: Iterable[Outcome], order: Sequence[str]) -> None:
    """Put new rows in the place of old ones; the rows of clients that did not run stay, those not in `order` go."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} does not hold {BEGIN!r} and {END!r}")
    rows = {row[0]: row for row in map(_cells, old.splitlines()) if row and row[0] in order}
    rows |= {outcome.client: outcome.row() for outcome in outcomes}
    lines = [HEAD, ("---",) * len(HEAD), *(rows[name] for name in order if name in rows)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
