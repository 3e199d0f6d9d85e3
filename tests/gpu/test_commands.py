"""The two commands: each step can run and has its time, and a dry run goes through."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.device_threads import DeviceThreads
from tests.gpu.__main__ import LEAST_S, ROOT, calls
from tests.gpu.checks import CHECKS
from tests.gpu.engine import MODES
from tests.gpu.sanitizer import SMALL
from tests.gpu.shapes import GPU_SHAPES
from tests.gpu.steps import CALLS, COMMANDS, GPU, LIMIT_S


@pytest.mark.parametrize(("command", "name"), [(c, name) for c, steps in COMMANDS.items() for name in steps])
def test_every_step_can_run_and_is_described(command: str, name: str) -> None:
    step = COMMANDS[command][name]
    module = importlib.import_module(f"tests.gpu.{step.module}")
    known = {"checks": CHECKS, "engine": [f"{model}/{mode}" for model in GPU_SHAPES for mode in MODES]}
    assert callable(module.run) and (step.argument or None) in known.get(step.module, [None])
    assert name == "machine" or f"`{name}`" in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_boxes_of_a_command_are_eight_minutes_together(command: str) -> None:
    assert sum(step.limit_s for step in COMMANDS[command].values()) <= LIMIT_S <= 470
    assert all(step.limit_s > LEAST_S for step in COMMANDS[command].values())


def test_the_calls_have_every_test_and_are_commands() -> None:
    for command, names in CALLS:
        assert sum(COMMANDS[command][name].limit_s for name in names) < 0.8 * LIMIT_S
    assert {name for command, names in CALLS for name in names if command == "test"} == COMMANDS[
        "test"
    ].keys()
    lines = [line for line in calls() if "tests.gpu" in line]
    assert len(lines) == len(CALLS)
    assert lines[0].endswith(
        'bench questions limits; code=$?; tar czf "${OUT:-.}/gpu-1.tgz" build/gpu; exit $code'
    )


def test_compute_sanitizer_sees_every_kernel() -> None:
    """And a test that it names is there."""
    folder = ROOT / "shared" / "kernels" / "triton"
    found = (re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M) for path in folder.glob("*.py"))
    assert {name for names in found for name in names} == SMALL.keys()
    tests = "".join(path.read_text() for path in (ROOT / "tests/kernels/triton").glob("test_*.py"))
    assert all(f"def {words.split()[0]}(" in tests for words in SMALL.values())


def test_the_gpu_has_its_index() -> None:
    """`DeviceThreads` needs one."""
    DeviceThreads.of(torch.device(GPU))
    with pytest.raises(AssertionError, match="index"):
        DeviceThreads.of(torch.device("cuda"))


@pytest.mark.parametrize("words", [("bench", "limits", "questions")], ids=" ".join)
def test_a_dry_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The quickest steps; `make test-gpu ARGS=--dry-run` and `make bench-gpu ARGS=--dry-run` run all."""
    command = [sys.executable, "-m", "tests.gpu", words[0], "--dry-run", *words[1:], "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / f"{words[0]}.json").read_text())
    assert {row["step"] for row in result["rows"]} == set(words[1:])
    assert result["dry_run"] and "FAIL" not in done.stdout
