"""Runs tests of this repository in the step's process, and reports a row for each case.

The tests read where to run from the environment (`tests.device`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.device import VARIABLE
from tests.gpu.rows import Row, Verdict
from tests.gpu.steps import Place, Report

ROOT = Path(__file__).resolve().parents[2]


def run_tests(place: Place, report: Report, words: Sequence[str]) -> None:
    """Run pytest with `words` on the place's device. Warnings of the machine's packages fail nothing."""
    os.environ[VARIABLE] = place.device
    plugin = _Reporter(report)
    code = pytest.main(
        [*words, "-q", "--rootdir", str(ROOT), "-o", "filterwarnings=default", "--durations=10"], [plugin]
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest {' '.join(words)}: {code!r}")


class _Reporter:
    """A plugin that makes a row of each test: its function is what is checked, its parameters are the case."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        what, _, case = report.nodeid.rpartition("::")[2].partition("[")
        verdict, note = Verdict.PASS, ""
        if report.failed:
            verdict, note = Verdict.FAIL, _reason(report)
        elif report.skipped:
            assert isinstance(report.longrepr, tuple)
            verdict, note = Verdict.SKIP, report.longrepr[2].removeprefix("Skipped: ")
        case = case.removesuffix("]")
        note = f"{case}: {note}" if case and note else note
        self._report(
            Row(
                what=what.removeprefix("test_"),
                verdict=verdict,
                note=note,
                seconds=report.duration,
                more={"case": case},
            )
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report(
                Row(what=report.nodeid, verdict=Verdict.FAIL, note=str(report.longrepr).splitlines()[-1])
            )


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (
        crash.message.splitlines()[0] if crash is not None and crash.message else report.longreprtext[-200:]
    )
