"""The network namespaces of the tests leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.matrix.namespaces import why_no_namespaces
from tests.patience import until

pytestmark = pytest.mark.processes

HOLD_A_NAMESPACE = """
from tests.fault.matrix.namespaces import Namespaces
with Namespaces(["p0"]) as network:
    print(network.name_of("p0"), flush=True)
    input()
"""


def test_nothing_is_left_of_a_test_that_was_killed() -> None:
    if why_no_namespaces():
        pytest.skip(f"no network namespaces: {why_no_namespaces()}")
    argv = [sys.executable, "-c", HOLD_A_NAMESPACE]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        places = (Path("/run/netns", name), Path("/sys/class/net", name.partition("-")[0]))
        assert all(place.exists() for place in places), name
        child.kill()
    until(lambda: not any(place.exists() for place in places), f"{name} is gone")
