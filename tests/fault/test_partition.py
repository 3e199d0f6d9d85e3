"""Nodes in network namespaces of their own, whose connections are cut in the middle of transfers and streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.matrix.cells import PARTITIONS, Cell, Fault, Transport
from tests.fault.matrix.fleet_nodes import make_matrix_model
from tests.fault.matrix.holding import Stage
from tests.fault.matrix.matrix import NODES, Matrix
from tests.fault.matrix.namespaces import Namespaces, why_no_namespaces
from tests.patience import until

pytestmark = pytest.mark.processes

HOLD_A_NAMESPACE = """
from tests.fault.matrix.namespaces import Namespaces
with Namespaces(["p0"]) as network:
    print(network.name_of("p0"), flush=True)
    input()
"""


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    if why_no_namespaces():
        pytest.skip(f"no network namespaces: {why_no_namespaces()}")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("partition")
    model = make_matrix_model(folder / "model")
    with Namespaces(NODES) as network, Matrix(folder, model, Transport.GLOO, network=network) as matrix:
        yield matrix
        matrix.fleet.stop()


@pytest.mark.parametrize("fault", PARTITIONS)
def test_streams_survive(matrix: Matrix, fault: Fault) -> None:
    stage = Stage.STREAMING if fault is Fault.DECODE_CUT_OFF else Stage.TRANSFERRING
    with matrix.mended():
        print(matrix.run(Cell(fault, stage, Transport.GLOO)))


def test_nothing_is_left_of_a_test_that_was_killed() -> None:
    argv = [sys.executable, "-c", HOLD_A_NAMESPACE]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        places = (Path("/run/netns", name), Path("/sys/class/net", name.partition("-")[0]))
        assert all(place.exists() for place in places), name
        child.kill()
    until(lambda: not any(place.exists() for place in places), f"{name} is gone")
