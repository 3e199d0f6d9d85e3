"""The checks of `make test-gpu`, which are tests of this repository."""

from __future__ import annotations

import importlib.util
import os

from tests.gpu.pytest_rows import run_tests
from tests.gpu.steps import Place, Report

KERNELS = ("tests/kernels/triton", "--ignore=tests/kernels/triton/test_cubins.py")
CHECKS = {
    "kernels": KERNELS,
    "golden": (
        "tests/gpu/golden.py",
        "tests/unit/engine/test_vocab_mask.py::test_logits_of_other_tokens_are_gone",
    ),
    "exactness": ("tests/gpu/exactness.py",),
    "fleet": (
        "tests/gpu/fleet.py",
        "tests/unit/kvtransfer/test_nccl_links.py::test_torch_has_the_options_that_are_set",
    ),
    "matrix": ("tests/gpu/kill_matrix.py",),
}


MOST_WORKERS = 8


def run(place: Place, report: Report, argument: str) -> None:
    """Run the tests of a check."""
    words = list(CHECKS[argument])
    if argument == "kernels" and not place.is_dry:
        words += workers()
    run_tests(place, report, words)


def workers() -> list[str]:
    """Each case compiles kernels for seconds: where pytest-xdist is installed, several do so at once."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2)))]
