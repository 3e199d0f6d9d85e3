"""Small shapes of every kernel under compute-sanitizer: bytes that a kernel may not touch, races in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.device import VARIABLE
from tests.gpu.checks import KERNELS
from tests.gpu.pytest_rows import ROOT
from tests.gpu.rows import Row, Verdict
from tests.gpu.steps import Place, Report, Skipped

TOOLS = ("memcheck", "racecheck")
SMALL = (
    "(slow_twin and split-edges and D128) or (add_norm and 3-1024) or (silu_mul and 3-70) or (rotary and 12)"
    " or (norm_rope_write and H5) or (test_linear and 65-33) or writes_enter or (sampl and 64) or pages"
)
"""Cases of tests/kernels/triton: each takes a hundred times as long."""
FOUND = 99
CUDA_BIN = Path("/usr/local/cuda/bin")


def run(place: Place, report: Report) -> None:
    """A row for each of its tools. Raises Skipped where there is none."""
    if place.is_dry:
        raise Skipped("needs a GPU")
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{CUDA_BIN}")
    if sanitizer is None:
        raise Skipped(f"there is no compute-sanitizer on the PATH or in {CUDA_BIN}")
    environment = {
        **os.environ,
        VARIABLE: place.device,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # so that every tensor is an allocation of its own
    }
    pytest = [sys.executable, "-m", "pytest", *KERNELS, "-k", SMALL, "-q", "-o", "filterwarnings=default"]
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *pytest]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        report(row(tool, done.returncode, done.stdout))


def row(tool: str, code: int, output: str) -> Row:
    """What the tool's exit code and its output say."""
    if "Device not supported" in output or "Unable to" in output:
        lines = [line for line in output.splitlines() if "not supported" in line or "Unable to" in line]
        return Row(what=tool, verdict=Verdict.SKIP, note=f"the tool does not run here: {lines[0]}")
    if code:
        lines = [line for line in output.splitlines() if line.startswith("=========")]
        note = lines[1] if len(lines) > 1 and code == FOUND else f"code {code}"
        return Row(what=tool, verdict=Verdict.FAIL, note=note)
    return Row(what=tool, verdict=Verdict.PASS)
