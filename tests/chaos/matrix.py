"""The whole kill matrix (tests/fault/matrix). It writes its table into docs/reliability.md."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.fault.matrix.cells import CELLS, PARTITIONS, Cell, Fault, Transport, why_not
from tests.fault.matrix.fleet_nodes import MODELS, Model, make_served
from tests.fault.matrix.holding import Stage
from tests.fault.matrix.matrix import Matrix, Times, matrix_over
from tests.fault.matrix.namespaces import why_no_namespaces

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
CELL_PATIENCE_S = 180.0
BEGIN, END = "<!-- matrix: written by `make chaos ARGS=matrix` -->", "<!-- end of matrix -->"


def run(*words: str) -> Iterator[dict[str, object]]:
    """Every cell of the transports that are named, or of all; with the `Model` that is named, or that of each.

    The table is written when all cells have run with theirs; a cell that failed is in it too.
    """
    results: dict[Cell, Times | str] = {}
    named = [Model(word) for word in words if word not in set(Transport)]
    assert len(named) <= 1, f"one model at a time, not {named}"
    chosen = [Transport(word) for word in words if word in set(Transport)] or list(Transport)
    with tempfile.TemporaryDirectory(prefix="baton-matrix-") as name:
        folder = Path(name)
        models = dict.fromkeys(Transport, named[0]) if named else MODELS
        for transport in chosen:
            model = make_served(folder / transport / "model", models[transport])
            with matrix_over(transport, folder / transport, model, patience_s=CELL_PATIENCE_S) as matrix:
                for cell in [cell for cell in CELLS if cell.transport is transport]:
                    start = time.monotonic()
                    results[cell] = _run_cell(matrix, cell)
                    seconds = round(time.monotonic() - start, 1)
                    yield {"cell": str(cell), "result": str(results[cell]), "seconds": seconds}
    if set(chosen) == set(Transport) and not named:
        _write(results)
    failed = {str(cell): result for cell, result in results.items() if str(result).startswith("failed")}
    assert not failed, failed


def _run_cell(matrix: Matrix, cell: Cell) -> Times | str:
    if cell.fault in PARTITIONS and why_no_namespaces():
        return f"not run here: {why_no_namespaces()}"
    try:
        with matrix.mended():
            return matrix.run(cell)
    except AssertionError as error:
        return f"failed: {error}"


def _write(results: Mapping[Cell, Times | str]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{after}")


def table(results: Mapping[Cell, Times | str]) -> str:
    """A row for each fault, a column for each stage, and below them the times."""
    notes: list[str] = []
    lines = [f"| | {' | '.join(Stage)} |", "| --- |" + " --- |" * len(Stage)]
    for fault in Fault:
        marks = [_mark(results, fault, stage, notes) for stage in Stage]
        lines.append(f"| {fault} | {' | '.join(marks)} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    lines += [
        "| what happens | detected, p50 | p99 | every stream goes on, p50 | p99 |",
        "| --- |" + " ---: |" * 4,
    ]
    for fault in Fault:
        of_fault = [r for cell, r in results.items() if cell.fault is fault and isinstance(r, Times)]
        detected = sorted(r.detected_s for r in of_fault if r.detected_s is not None)
        recovered = sorted(r.recovered_s for r in of_fault if r.recovered_s is not None)
        if detected or recovered:
            lines.append(f"| {fault} | {_quantiles(detected)} | {_quantiles(recovered)} |")
    return "\n".join(lines) + "\n"


def _mark(results: Mapping[Cell, Times | str], fault: Fault, stage: Stage, notes: list[str]) -> str:
    marks = set[str]()
    for cell in (Cell(fault, stage, transport) for transport in Transport):
        result = results.get(cell) or why_not(cell) or "failed"
        if isinstance(result, Times):
            marks.add("ok")
        elif result.startswith("failed"):
            marks.add("**failed**")
        else:
            if result not in notes:
                notes.append(result)
            marks.add(f"({notes.index(result) + 1})")
    return " ".join(sorted(marks, reverse=True))


def _quantiles(sorted_s: Sequence[float]) -> str:
    if not sorted_s:
        return "– | –"
    p50, p99 = (sorted_s[min(int(len(sorted_s) * q), len(sorted_s) - 1)] for q in (0.5, 0.99))
    return f"{p50:.2f} s | {p99:.2f} s"
