"""`make test-gpu` and `make bench-gpu`: each step in a process of its own, then one table, JSON and logs.

Steps run one after the other, each within its own time box and all within the box of the command. A step that fails,
hangs or loses the GPU's context ends nothing but itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tests.bench.leaving import leave_on_signals
from tests.gpu.rows import Row, Verdict, table
from tests.gpu.steps import COMMANDS, LIMIT_S, Step

ROOT = Path(__file__).resolve().parents[2]
LEAVING_S = 10.0
"""A step whose time is over has so long to end its nodes before it is killed with all that it has started."""
LEAST_S = 10.0
"""A step is not begun with less time left."""
LOG_TAIL_LINES = 12
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux's prctl."""
DRY_LIMITS = 6.0
"""A dry run is not for measuring, and may be on a slow machine: its boxes are so many times as long."""


def main() -> int:
    options = _options()
    leave_on_signals()
    adopt_orphans()
    steps = COMMANDS[options.command]
    names = options.names or list(steps)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    begun, longer = time.monotonic(), DRY_LIMITS if options.dry_run else 1.0
    rows: list[tuple[str, Row]] = []
    for name in names:
        left_s = LIMIT_S * longer - (time.monotonic() - begun)
        limit_s = min(steps[name].limit_s * longer, left_s)
        print(f"{name}: {steps[name].asks}", file=sys.stderr, flush=True)
        rows += [(name, row) for row in run_step(name, steps[name], limit_s, out, dry=options.dry_run)]
    seconds = time.monotonic() - begun
    failed = list(dict.fromkeys(step for step, row in rows if row.verdict is Verdict.FAIL))
    for name in failed:
        print(f"---------- {name}: {out / name}.log\n{log_tail(out / f'{name}.log')}")
    print(f"\n{table(rows)}\n")
    path = out / f"{options.command}.json"
    _write(path, options.command, rows, seconds, dry=options.dry_run)
    dry = "DRY RUN on a CPU: no figure means anything. " if options.dry_run else ""
    print(f"{dry}{len(names)} steps in {seconds:.0f} s, {len(failed)} with failures; {path}")
    return 1 if failed else 0


def within(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code of a process, or None if it has not ended after `limit_s`."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def run_step(
    name: str,
    step: Step,
    limit_s: float,
    out: Path,
    *,
    dry: bool,
    wait: Callable[[subprocess.Popen[bytes], float], int | None] = within,
) -> list[Row]:
    """Run one step to its end, or to that of its box. What it has not said itself is a row of its own."""
    if limit_s < LEAST_S:
        return [Row(what=name, verdict=Verdict.SKIP, note="no time left for it")]
    rows_path, log_path, begun = out / f"{name}.rows", out / f"{name}.log", time.monotonic()
    rows_path.write_text("")
    words = [sys.executable, "-X", "faulthandler", "-m", "tests.gpu.step", name, str(out), step.module]
    words += [step.argument] * bool(step.argument)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*words, *(["--dry-run"] if dry else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            code = wait(process, limit_s)
        finally:
            end_step(process)
    rows = [Row.from_json(line) for line in rows_path.read_text().splitlines()]
    seconds = round(time.monotonic() - begun, 1)
    if code is None:
        note = f"not done within {limit_s:.0f} s; the rows above are what it has found"
        rows.append(Row(what=name, verdict=Verdict.FAIL, note=note, seconds=seconds))
    elif code:
        note = f"code {code}: {last_words(log_path)}"
        rows.append(Row(what=name, verdict=Verdict.FAIL, note=note, seconds=seconds))
    elif not rows:
        rows.append(Row(what=name, verdict=Verdict.FAIL, note="reported nothing", seconds=seconds))
    return rows


def end_step(process: subprocess.Popen[bytes]) -> None:
    """End a step and everything that it has started, whatever state that is in."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(LEAVING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    left = psutil.Process().children(recursive=True)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=LEAVING_S)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent dies, so that those of a step that was killed can be ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def last_words(path: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = path.read_text(errors="replace").rstrip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])


def log_tail(path: Path) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").rstrip().splitlines()[-LOG_TAIL_LINES:])


def _write(path: Path, command: str, rows: Sequence[tuple[str, Row]], seconds: float, *, dry: bool) -> None:
    result: Mapping[str, object] = {
        "command": command,
        "dry_run": dry,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(seconds),
        "rows": [{"step": step, **json.loads(row.as_json())} for step, row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("names", nargs="*", metavar="STEP", help="some of the steps (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", metavar="DIR")
    options = parser.parse_args()
    steps = COMMANDS[options.command]
    if unknown := [name for name in options.names if name not in steps]:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(steps)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
