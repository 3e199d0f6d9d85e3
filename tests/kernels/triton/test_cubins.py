"""The gates of `make test-cubins`, with one configuration of each kernel and the Triton that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.cubins import Configuration, Cubin, tiles_ahead
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


GOOD = Cubin(
    registers=255,
    stack_nbytes=0,
    shared_nbytes=99 << 10,
    spills=0,
    wide_loads=4,
    matrix_instructions=1,
    tiles_ahead=1,
)
PRODUCT = Configuration(
    name="product",
    kernel=None,
    types={},
    constants={},
    options=lambda arch: {},
    has_products=True,
    min_wide_loads=4,
    min_tiles_ahead=lambda arch: 1,
)


def test_the_depth_is_that_of_the_loop_that_waits_most() -> None:
    loop = "scf.for %i = 0 to 8 { ttg.async_wait %k, %v {num = NUM : i32} tt.dot %q, %k scf.yield }"
    ahead, waiting = loop.replace("NUM", "2"), loop.replace("NUM", "0")
    at_once = "scf.for %i = 0 to 8 { tt.load %k tt.dot %q, %k scf.yield }"
    assert [tiles_ahead(ttgir) for ttgir in (ahead, ahead + waiting, ahead + at_once, "")] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"stack_nbytes": 8}, "spills"),
        ({"spills": 1}, "spills"),
        ({"shared_nbytes": (99 << 10) + 1}, "shared memory"),
        ({"wide_loads": 3}, "loads of 16 bytes"),
        ({"matrix_instructions": 0}, "tensor core"),
        ({"tiles_ahead": 0}, "turns ahead"),
    ],
)
def test_each_gate_closes(changed: dict[str, int], fault: str | None) -> None:
    faults = Cubin(**{**vars(GOOD), **changed}).faults(PRODUCT, 120)
    assert len(faults) == (fault is not None) and (fault is None or fault in faults[0])
