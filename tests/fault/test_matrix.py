"""A cut of the kill matrix; `make chaos ARGS=matrix` runs all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.matrix.cells import CELLS, Cell, Fault, Transport
from tests.fault.matrix.fleet_nodes import make_matrix_model
from tests.fault.matrix.holding import Stage
from tests.fault.matrix.matrix import Matrix

pytestmark = pytest.mark.processes

CUT = [
    *(
        Cell(fault, stage, Transport.SHM)
        for fault, stage in (
            (Fault.PREFILL_KILLED, Stage.PREFILLING),
            (Fault.DECODE_KILLED, Stage.QUEUED),
            (Fault.DECODE_KILLED, Stage.PREFILLING),
            (Fault.DECODE_KILLED, Stage.COMPILING),
            (Fault.DECODE_KILLED, Stage.STREAMING),
            (Fault.DECODES_KILLED, Stage.STREAMING),
            (Fault.DECODE_KILLED, Stage.RE_PREFILLING),
            (Fault.DECODE_KILLED, Stage.MOVING),
            (Fault.TARGET_KILLED, Stage.DRAINING),
            (Fault.PREFILL_STOPPED, Stage.TRANSFERRING),
            (Fault.DECODE_STOPPED, Stage.STREAMING),
            (Fault.ROUTER_KILLED, Stage.STREAMING),
            (Fault.CLIENT_GONE, Stage.QUEUED),
            (Fault.CLIENT_GONE, Stage.PREFILLING),
            (Fault.CLIENT_GONE, Stage.STREAMING),
        )
    ),
    *(
        Cell(fault, stage, Transport.GLOO)
        for fault, stage in (
            (Fault.PREFILL_KILLED, Stage.TRANSFERRING),
            (Fault.DECODE_KILLED, Stage.HANDED_OFF),
            (Fault.PREFILL_STALLED, Stage.PREFILLING),
            (Fault.DECODE_STALLED, Stage.RETRACTED),
            (Fault.DECODE_STOPPED, Stage.TRANSFERRING),
            (Fault.DECODE_KILLED, Stage.ABORTING),
            (Fault.LINK_LOST, Stage.TRANSFERRING),
            (Fault.LINK_LOST, Stage.MOVING),
            (Fault.CLIENT_GONE, Stage.TRANSFERRING),
            (Fault.CLIENT_GONE, Stage.HANDED_OFF),
        )
    ),
]


@pytest.fixture(scope="module")
def matrix_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_matrix_model(tmp_path_factory.mktemp("models") / "matrix")


@pytest.fixture(scope="module")
def shm(matrix_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(tmp_path_factory.mktemp("matrix-shm"), matrix_model, Transport.SHM) as matrix:
        yield matrix
        matrix.fleet.stop()


@pytest.fixture(scope="module")
def gloo(matrix_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(tmp_path_factory.mktemp("matrix-gloo"), matrix_model, Transport.GLOO) as matrix:
        yield matrix
        matrix.fleet.stop()


@pytest.mark.parametrize("cell", [cell for cell in CUT if cell.transport is Transport.SHM], ids=str)
def test_over_shm(shm: Matrix, cell: Cell) -> None:
    run_cell(shm, cell)


@pytest.mark.parametrize("cell", [cell for cell in CUT if cell.transport is Transport.GLOO], ids=str)
def test_over_gloo(gloo: Matrix, cell: Cell) -> None:
    run_cell(gloo, cell)


def run_cell(matrix: Matrix, cell: Cell) -> None:
    assert cell in CELLS
    with matrix.mended():
        print(matrix.run(cell))
