"""The gates of `make test-cubins`, with one configuration of each kernel and the Triton that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


def compiling(module: str, *arguments: str) -> str:
    """What a process prints whose kernels are not interpreted, as those of this one are."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.kernels.triton.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(ROOT / "build" / "triton")},
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_configuration_of_each_kernel_passes_the_gates() -> None:
    assert compiling("cubins", "--first").endswith(" cubins, 0 at fault\n")


def test_forwards_compile_what_the_configurations_say_and_wait_for_no_value() -> None:
    assert compiling("launches").endswith("\n0 launches that no configuration describes, not launched: []\n")
