"""The process of one step: `python -m tests.gpu.step NAME OUT [--dry-run] MODULE [ARGUMENT]`.

Its rows go to OUT/NAME.rows.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.leaving import leave_on_signals
from tests.gpu.rows import Row, Verdict
from tests.gpu.steps import GPU, Place, Skipped


def main(name: str, out: Path, module: str, arguments: Sequence[str], *, dry: bool) -> None:
    """Run the step. An exception of it ends the process with its traceback."""
    leave_on_signals()
    begun = time.monotonic()
    with (
        (out / f"{name}.rows").open("w") as rows,
        tempfile.TemporaryDirectory(prefix="baton-gpu-") as scratch,
    ):

        def report(row: Row) -> None:
            nonlocal begun
            if row.seconds is None:
                row = replace(row, seconds=round(time.monotonic() - begun, 2))
            begun = time.monotonic()
            rows.write(row.as_json() + "\n")
            rows.flush()

        try:
            if not dry:
                _need_a_gpu()
            place = Place(device="cpu" if dry else GPU, out=out, scratch=Path(scratch))
            importlib.import_module(f"tests.gpu.{module}").run(place, report, *arguments)
        except Skipped as reason:
            report(Row(what=name, verdict=Verdict.SKIP, note=str(reason)))


def _need_a_gpu() -> None:
    import torch  # seconds, which no dry run of a step without torch should take

    if not torch.cuda.is_available():
        raise Skipped("NO GPU HERE: torch sees none (try --dry-run)")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    main(words[0], Path(words[1]), words[2], words[3:], dry="--dry-run" in sys.argv)
