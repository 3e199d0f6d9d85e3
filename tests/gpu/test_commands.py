"""The two commands: the sanitizer has every kernel, and a dry run goes through."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.gpu.__main__ import ROOT
from tests.gpu.sanitizer import SMALL


def test_compute_sanitizer_sees_every_kernel() -> None:
    """And a test that it names is there."""
    folder = ROOT / "shared" / "kernels" / "triton"
    found = (re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M) for path in folder.glob("*.py"))
    assert {name for names in found for name in names} == SMALL.keys()
    tests = "".join(path.read_text() for path in (ROOT / "tests/kernels/triton").glob("test_*.py"))
    assert all(f"def {words.split()[0]}(" in tests for words in SMALL.values())


def test_a_dry_run(tmp_path: Path) -> None:
    """The quickest steps; `make test-gpu ARGS=--dry-run` and `make bench-gpu ARGS=--dry-run` run all."""
    steps = ["limits", "questions"]
    command = [sys.executable, "-m", "tests.gpu", "bench", "--dry-run", *steps, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert {row["step"] for row in result["rows"]} == set(steps)
    assert result["dry_run"] and "FAIL" not in done.stdout
