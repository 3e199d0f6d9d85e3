"""Where the time of one request went, as a table: a row for each stage that a node entered."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

Stage = tuple[str, str, float]
"""Role, stage and time in seconds since the epoch; in order of time."""


def stage_table(stages: Sequence[Stage], kv_pages: int, kv_bytes: int) -> Table:
    """The table, with what was transferred beneath it."""
    table = Table(title="Where its time went", title_justify="left")
    for name in ("node", "stage", "at", "for"):
        table.add_column(name, justify="right" if name in ("at", "for") else "left")
    for at, (role, stage, time) in enumerate(stages):
        until = next((later for later in stages[at + 1 :] if later[0] == role), None)
        lasted = _milliseconds(until[2] - time) if until and role != "router" else ""
        table.add_row(role, stage, _milliseconds(time - stages[0][2]), lasted)
    table.caption = f"{kv_pages} KV pages, {kv_bytes:,} bytes moved"
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
