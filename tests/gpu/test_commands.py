"""The two commands go on after a step that fails, report what it has found, and leave no process behind."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from shared.device_threads import DeviceThreads
from tests.gpu.__main__ import LEAST_S, ROOT, Run, run_step
from tests.gpu.checks import CHECKS, KERNELS
from tests.gpu.engine import MODES
from tests.gpu.rows import Row, Target, Verdict, figure, table
from tests.gpu.sanitizer import SMALL, WORDS
from tests.gpu.shapes import GPU_SHAPES
from tests.gpu.steps import COMMANDS, GPU, LIMIT_S, Step
from tests.patience import until


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


@pytest.mark.parametrize("command", COMMANDS)
def test_the_boxes_of_a_command_are_eight_minutes_together(command: str) -> None:
    assert sum(step.limit_s for step in COMMANDS[command].values()) <= LIMIT_S <= 470
    assert all(step.limit_s > LEAST_S for step in COMMANDS[command].values())


@pytest.mark.parametrize("took_s", [5.0, 60.0, 100.0])
def test_a_step_has_its_box_and_what_those_before_it_have_left(tmp_path: Path, took_s: float) -> None:
    """One that is ended late takes from those behind it, and what is not begun for that is in the table."""
    now, given = [0.0], list[float]()
    boxes = {"first": LIMIT_S - 90, "second": 60.0, "third": 30.0}
    takes = {"first": LIMIT_S - 90 + took_s - 60, "second": 80.0, "third": 0.0}

    def run_one(name: str, step: Step, limit_s: float, out: Path, *, dry: bool) -> list[Row]:
        given.append(limit_s)
        now[0] += takes[name]
        return run_step(name, step, limit_s, out, dry=dry) if limit_s < LEAST_S else []

    steps = {name: Step(module="planted", asks="", limit_s=box) for name, box in boxes.items()}
    run = Run("test", steps, tmp_path, dry=False, run_one=run_one, clock=lambda: now[0])
    assert run.to_its_end() == 0
    assert given == [LIMIT_S - 90, 120 - took_s, 70 - took_s]
    rows = json.loads((tmp_path / "test.json").read_text())["rows"]
    assert [(row["step"], row["verdict"]) for row in rows] == [("third", "skip")] * (took_s > 60)


def test_a_command_that_is_ended_says_what_it_has_found_and_what_it_has_not_begun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.planted", "three", str(tmp_path)]
    stuck = tmp_path / "stuck.rows"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: stuck.exists() and '"child"' in stuck.read_text(), "the second step hangs")
        before = json.loads((tmp_path / "test.json").read_text())
        process.terminate()
        printed, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert before["left"] == ["stuck", "later"]
    assert [(row["step"], row["what"]) for row in before["rows"]] == [("quick", "before")]
    result = json.loads((tmp_path / "test.json").read_text())
    assert result["left"] == []
    assert [(row["step"], row["what"], row["verdict"]) for row in result["rows"]] == [
        ("quick", "before", "pass"),
        ("stuck", "before", "pass"),
        ("stuck", "child", "pass"),
        ("stuck", "stuck", "FAIL"),
        ("later", "later", "skip"),
    ]
    assert "did not begin" in printed and "ended by signal 15" in printed
    assert not psutil.pid_exists(result["rows"][2]["value"])


def test_compute_sanitizer_sees_a_few_cases_of_every_kernel() -> None:
    """A test that is renamed, or has other ids, would leave its kernel out without a word."""
    folder = ROOT / "shared" / "kernels" / "triton"
    kernels = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)
    }
    assert kernels == SMALL.keys()
    words = [sys.executable, "-m", "pytest", *KERNELS, "-k", WORDS, "--collect-only", "-o", "addopts="]
    found = subprocess.run([*words, "-q"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cases = Counter(re.findall(r"::(test_\w+)", found))
    assert cases.keys() == {words.split()[0] for words in SMALL.values()}
    assert max(cases.values()) <= 8


def test_the_gpu_has_its_index() -> None:
    """`DeviceThreads` needs one."""
    DeviceThreads.of(torch.device(GPU))
    with pytest.raises(AssertionError, match="index"):
        DeviceThreads.of(torch.device("cuda"))


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
    command = [sys.executable, "-m", "tests.gpu", words[0], "--dry-run", *words[1:], "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / f"{words[0]}.json").read_text())
    assert {row["step"] for row in result["rows"]} == set(words[1:])
    assert result["dry_run"] and "FAIL" not in done.stdout
