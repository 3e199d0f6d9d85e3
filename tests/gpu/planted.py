"""Steps that go wrong, for the test of the two commands: `python -m tests.gpu.planted HOW OUT` runs one.

HOW is `three` for a command of three steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.leaving import leave_on_signals
from tests.gpu.__main__ import Run, adopt_orphans, run_step, within
from tests.gpu.rows import Row, Verdict
from tests.gpu.steps import LIMIT_S, Place, Report, Skipped, Step
from tests.patience import PATIENCE_S, until

SLEEP = "import time; time.sleep(3600)"


def run(place: Place, report: Report, how: str) -> None:
    """Report one good row, then go wrong."""
    report(Row(what="before", verdict=Verdict.PASS))
    match how:
        case "raises":
            raise ValueError("what was planted")
        case "dies":
            os.abort()
        case "hangs":
            child = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
            report(Row(what="child", verdict=Verdict.PASS, value=child.pid))
            time.sleep(3600)
        case "leaves":
            child = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
            report(Row(what="child", verdict=Verdict.PASS, value=child.pid))
        case "goes well":
            pass
        case "skips":
            raise Skipped("because of this")


def run_three(out: Path) -> int:
    """A command whose second step hangs."""
    leave_on_signals()
    hows = {"quick": "goes well", "stuck": "hangs", "later": "goes well"}
    steps = {
        name: Step(module="planted", asks="", limit_s=LIMIT_S / 3, argument=how) for name, how in hows.items()
    }
    return Run("test", steps, out, dry=True).to_its_end()


def main(how: str, out: Path) -> None:
    """Print the rows that the run of a step has."""

    def until_it_hangs(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
        until(lambda: '"child"' in (out / "step.rows").read_text(), "the step hangs")
        return None

    step = Step(module="planted", asks="", limit_s=PATIENCE_S, argument=how)
    wait = until_it_hangs if how == "hangs" else within
    for row in run_step("step", step, PATIENCE_S, out, dry=True, wait=wait):
        print(row.as_json())


if __name__ == "__main__":
    adopt_orphans()
    if sys.argv[1] == "three":
        sys.exit(run_three(Path(sys.argv[2])))
    main(sys.argv[1], Path(sys.argv[2]))
