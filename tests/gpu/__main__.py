"""`make test-gpu` and `make bench-gpu`: each step in a process of its own, then one table, JSON and logs.

Steps run one after the other, each within its own time box and all within the box of the command. A step that fails,
hangs or loses the GPU's context ends nothing but itself. `python -m tests.gpu calls` prints calls of both in the
order in which a GPU that is lent for minutes should get them, to be pasted one by one.
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
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tests.bench.leaving import leave_on_signals
from tests.gpu.rows import Row, Verdict, table
from tests.gpu.steps import CALLS, COMMANDS, LIMIT_S, Step

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
    if options.command == "calls":
        print("\n".join(calls()))
        return 0
    leave_on_signals()
    adopt_orphans()
    steps = COMMANDS[options.command]
    chosen = {name: steps[name] for name in options.names or steps}
    return Run(options.command, chosen, options.out, dry=options.dry_run).to_its_end()


def calls() -> Iterator[str]:
    """A line for each call, which may have a machine of its own. It leaves one file, in `$OUT` if that is set."""
    has_wheels, pip = (ROOT / "gpu-wheels").is_dir(), "python3 -m pip install --quiet --no-index --no-deps"
    python = "python3"
    if has_wheels:
        python = f"{pip} --target .gpu/site gpu-wheels/*.whl && PYTHONPATH=.gpu/site python3"
    for number, (command, names) in enumerate(CALLS, 1):
        kept = f'tar czf "${{OUT:-.}}/gpu-{number}.tgz" build/gpu'
        yield f"{python} -m tests.gpu {command} {' '.join(names)}; code=$?; {kept}; exit $code"


class Run:
    """A command and what it has found so far. Its JSON is written after each step, so little is lost with it."""

    def __init__(self, command: str, steps: Mapping[str, Step], out: Path, *, dry: bool) -> None:
        self._command, self._steps, self._out, self._dry = command, steps, out, dry
        self._rows: list[tuple[str, Row]] = []
        self._begun = time.monotonic()

    def to_its_end(self) -> int:
        """Run all steps, print the table. Returns the exit code, also after a signal that has told it to leave."""
        self._out.mkdir(parents=True, exist_ok=True)
        left, name, code = list(self._steps), "", 0
        try:
            while left:
                self._write(left)
                name = left.pop(0)
                self._run(name, left)
        except SystemExit as leaving:  # of `leave_on_signals`
            code = int(str(leaving.code))
            note = f"ended by signal {code - 128}; the rows above are what it has found"
            ended = [*rows_of(self._out, name), Row(what=name, verdict=Verdict.FAIL, note=note)]
            self._rows = [pair for pair in self._rows if pair[0] != name] + [(name, row) for row in ended]
            note = "did not begin before the command was ended"
            self._rows += [(step, Row(what=step, verdict=Verdict.SKIP, note=note)) for step in left]
        self._write([])
        failed = self._print()
        return code or failed

    def _run(self, name: str, later: Sequence[str]) -> None:
        """Give a step the time that is left beside the boxes of the `later` ones."""
        step, longer = self._steps[name], DRY_LIMITS if self._dry else 1.0
        reserved_s = sum(self._steps[other].limit_s for other in later)
        limit_s = longer * (LIMIT_S - reserved_s) - self._seconds
        print(f"{name}: {step.asks} (at most {limit_s:.0f} s)", file=sys.stderr, flush=True)
        rows = run_step(name, step, limit_s, self._out, dry=self._dry)
        self._rows += [(name, row) for row in rows]

    def _print(self) -> int:
        failed = list(dict.fromkeys(step for step, row in self._rows if row.verdict is Verdict.FAIL))
        for name in failed:
            path = self._out / f"{name}.log"
            print(f"---------- {name}: {path}\n{log_tail(path)}")
        print(f"\n{table(self._rows)}\n")
        dry = "DRY RUN on a CPU: no figure means anything. " if self._dry else ""
        counted = f"{len(self._steps)} steps in {self._seconds:.0f} s, {len(failed)} with failures"
        print(f"{dry}{counted}; {self._path}", flush=True)
        return 1 if failed else 0

    @property
    def _path(self) -> Path:
        return self._out / f"{self._command}.json"

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    def _write(self, left: Sequence[str]) -> None:
        """Replace the JSON as a whole. `left` names the steps that have not ended."""
        result: Mapping[str, object] = {
            "command": self._command,
            "dry_run": self._dry,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(self._seconds),
            "left": left,
            "rows": [{"step": step, **json.loads(row.as_json())} for step, row in self._rows],
        }
        scratch = self._path.with_suffix(".partial")
        scratch.write_text(json.dumps(result, indent=1) + "\n")
        scratch.rename(self._path)


def run_step(name: str, step: Step, limit_s: float, out: Path, *, dry: bool) -> list[Row]:
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
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_step(process)
    rows = rows_of(out, name)
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


def rows_of(out: Path, name: str) -> list[Row]:
    """What a step has reported so far."""
    path = out / f"{name}.rows"
    return [Row.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("command", choices=(*COMMANDS, "calls"))
    parser.add_argument("names", nargs="*", metavar="STEP", help="some of the steps (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for JSON and logs (default: build/gpu)")
    options = parser.parse_intermixed_args()
    # A dry run leaves limits and times too, which are no measure of a GPU.
    options.out = options.out or ROOT / "build" / ("gpu-dry-run" if options.dry_run else "gpu")
    steps = COMMANDS.get(options.command, {})
    if unknown := [name for name in options.names if name not in steps]:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(steps)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
