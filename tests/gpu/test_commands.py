"""The two commands go on after a step that fails, report what it has found, and leave no process behind."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu.__main__ import LEAST_S, ROOT, run_step
from tests.gpu.checks import CHECKS
from tests.gpu.engine import MODES
from tests.gpu.rows import Row, Target, Verdict, figure, table
from tests.gpu.shapes import GPU_SHAPES
from tests.gpu.steps import COMMANDS, Step


def planted(how: str, out: Path) -> list[Row]:
    """In a process of its own, since it ends every process that it finds below itself."""
    command = [sys.executable, "-m", "tests.gpu.planted", how, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Row.from_json(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("command", "name"), [(c, name) for c, steps in COMMANDS.items() for name in steps])
def test_every_step_can_run_and_is_described(command: str, name: str) -> None:
    step = COMMANDS[command][name]
    module = importlib.import_module(f"tests.gpu.{step.module}")
    known = {"checks": CHECKS, "engine": [f"{model}/{mode}" for model in GPU_SHAPES for mode in MODES]}
    assert callable(module.run) and (step.argument or None) in known.get(step.module, [None])
    assert name == "machine" or f"`{name}`" in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("how", "note"),
    [("raises", "code 1: ValueError: what was planted"), ("dies", "code -6: Fatal Python error: Aborted")],
)
def test_a_step_that_fails_keeps_its_rows(tmp_path: Path, how: str, note: str) -> None:
    before, failed = planted(how, tmp_path)
    assert (before.what, before.verdict) == ("before", Verdict.PASS)
    assert failed.verdict is Verdict.FAIL and failed.note.startswith(note)


def test_a_step_that_cannot_run_says_why(tmp_path: Path) -> None:
    skipped = planted("skips", tmp_path)[-1]
    assert (skipped.verdict, skipped.note) == (Verdict.SKIP, "because of this")


@pytest.mark.parametrize("how", ["hangs", "leaves"])
def test_nothing_of_a_step_is_left(tmp_path: Path, how: str) -> None:
    rows = planted(how, tmp_path)
    (pid,) = [row.value for row in rows if row.what == "child"]
    assert isinstance(pid, int) and not psutil.pid_exists(pid)
    assert (rows[-1].verdict is Verdict.FAIL) == (how == "hangs")


def test_no_step_begins_without_time(tmp_path: Path) -> None:
    step = Step(module="planted", asks="", limit_s=100, argument="raises")
    (row,) = run_step("step", step, LEAST_S / 2, tmp_path, dry=True)
    assert row.verdict is Verdict.SKIP


def test_cases_of_one_check_share_a_line() -> None:
    rows = [
        *(("kernels", Row(what="norm", verdict=Verdict.PASS, seconds=0.5)) for _ in range(3)),
        ("kernels", Row(what="norm", verdict=Verdict.FAIL, note="B2: off by 3", seconds=0.5)),
        ("limits", figure("copy", 4300.0, "GB/s")),
        ("8b", figure("decode", 0.7, target=Target(at_least=0.75))),
    ]
    cells = [[cell for cell in line.split("  ") if cell] for line in table(rows).splitlines()]
    assert [[cell.strip() for cell in line] for line in cells[1:]] == [
        ["kernels", "norm", "FAIL", "2.0", "1 of 4 cases: B2: off by 3"],
        ["limits", "copy", "4300 GB/s"],
        ["8b", "decode", "missed", "0.7", ">= 0.75"],
    ]


@pytest.mark.parametrize(("value", "met"), [(0.6, True), (0.59, False), (float("nan"), False)])
def test_targets(value: float, met: bool) -> None:
    assert Target(at_least=0.6).is_met(value) == met


def test_rows_survive_their_file() -> None:
    row = figure("x", 0.5, "GB/s", target=Target(at_most=1.0), note="why", gb_s=3.0)
    assert Row.from_json(row.as_json()) == row


@pytest.mark.parametrize("words", [("bench", "limits", "questions")], ids=" ".join)
def test_a_dry_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The quickest steps; `make test-gpu ARGS=--dry-run` and `make bench-gpu ARGS=--dry-run` run all."""
    command = [sys.executable, "-m", "tests.gpu", *words, "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / f"{words[0]}.json").read_text())
    assert {row["step"] for row in result["rows"]} == set(words[1:])
    assert result["dry_run"] and "FAIL" not in done.stdout
