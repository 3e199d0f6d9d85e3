"""The checks of `make test-gpu`, which are tests of this repository."""

from __future__ import annotations

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
    "fleet": ("tests/gpu/fleet.py",),
    "matrix": ("tests/gpu/kill_matrix.py",),
}


def run(place: Place, report: Report, argument: str) -> None:
    """Run the tests of a check."""
    words = list(CHECKS[argument])
    run_tests(place, report, words)
