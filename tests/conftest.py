"""For all tests: how Triton and coroutines run, how processes share the cores, and the logs of fleets that failed."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.device import device
from tests.processes import attach_logs

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As behind `make test &` in a script. Processes that tests start would inherit it, and not end by Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if device().type == "cpu":
    # Triton's interpreter. Triton reads this when it is imported, so before the first test module.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start real nodes run in two lanes, one after the other: each loads several cores by itself.

    Those of tests/fault wait much, since processes have to be missed, and are more than half of all.
    """
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("faults" if "fault" in item.path.parts else "processes"))


def pytest_collection_finish() -> None:
    """Torch has one thread in each test process: several would fight for the cores."""
    if device().type == "cpu" and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        attach_logs(item, report)
    return report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "uvloop: a coroutine that runs in the router's own event loop")
    config.addinivalue_line("markers", "xdist_group(name): runs in one process with others of the name")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine function. Its fixtures are none.

    They know no event loop, but for the `loop` on which all tests of tests/browser run.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run = uvloop.run if pyfuncitem.get_closest_marker("uvloop") else asyncio.run
    if "loop" in pyfuncitem.funcargs:
        run = pyfuncitem.funcargs["loop"].run
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def log_restored() -> Iterator[None]:
    """For tests that set the log up: a later test would write to a stderr that pytest has closed by then."""
    logger = logging.getLogger("baton")
    before = (logger.handlers[:], logger.propagate, logger.level)
    yield
    logger.handlers[:], logger.propagate, logger.level = before


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """For tests that this machine can only run with the native kernels."""
    from shared.kernels.cpu.build import NativeUnavailable
    from shared.kernels.cpu.library import load_library

    try:
        load_library()
    except NativeUnavailable as reason:
        pytest.skip(f"NO NATIVE KERNELS: {reason}")
