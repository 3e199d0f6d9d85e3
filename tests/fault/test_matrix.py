"""A cut of the kill matrix; `make chaos ARGS=matrix` runs all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.fault.matrix.cells import CELLS, PARTITIONS, Cell, Fault, Transport
from tests.fault.matrix.fleet_nodes import MODELS, make_served
from tests.fault.matrix.holding import Stage
from tests.fault.matrix.matrix import Matrix, matrix_over
from tests.fault.matrix.namespaces import why_no_namespaces

pytestmark = pytest.mark.processes

CUT = [
    Cell(fault, stage, transport)
    for transport, cells in {
        Transport.SHM: (
            (Fault.NONE, Stage.MOVING),
            (Fault.NONE, Stage.DRAINING),
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
        ),
        Transport.GLOO: (
            (Fault.PREFILL_KILLED, Stage.TRANSFERRING),
            (Fault.DECODE_KILLED, Stage.HANDED_OFF),
            (Fault.PREFILL_STALLED, Stage.PREFILLING),
            (Fault.DECODE_STALLED, Stage.RETRACTED),
            (Fault.DECODE_STOPPED, Stage.TRANSFERRING),
            (Fault.DECODE_KILLED, Stage.ABORTING),
            (Fault.LINK_LOST, Stage.TRANSFERRING),
            (Fault.LINK_LOST, Stage.MOVING),
            (Fault.NONE, Stage.DRAINING),
            (Fault.CLIENT_GONE, Stage.TRANSFERRING),
            (Fault.CLIENT_GONE, Stage.HANDED_OFF),
            (Fault.PREFILL_CUT_OFF, Stage.TRANSFERRING),
            (Fault.DECODE_CUT_OFF, Stage.STREAMING),
            (Fault.CUT_APART, Stage.TRANSFERRING),
        ),
        Transport.TCP: (
            (Fault.PREFILL_KILLED, Stage.TRANSFERRING),
            (Fault.LINK_LOST, Stage.MOVING),
            (Fault.CUT_APART, Stage.TRANSFERRING),
            (Fault.DECODE_KILLED, Stage.RETRACTED),
            (Fault.NONE, Stage.DRAINING),
        ),
        Transport.TLS: (
            (Fault.LINK_LOST, Stage.TRANSFERRING),
            (Fault.DECODE_KILLED, Stage.TRANSFERRING),
            (Fault.DECODE_CUT_OFF, Stage.TRANSFERRING),
        ),
    }.items()
    for fault, stage in cells
]


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Transport], Matrix]]:
    """The fleet over a transport. There is one at a time: it ends when the next is asked for."""
    with contextlib.ExitStack() as running:
        fleets: dict[Transport, Matrix] = {}

        def fleet(transport: Transport) -> Matrix:
            if transport not in fleets:
                fleets.clear()
                running.close()
                folder = tmp_path_factory.mktemp(f"matrix-{transport}")
                model = make_served(folder / "model", MODELS[transport])
                fleets[transport] = running.enter_context(matrix_over(transport, folder, model))
            return fleets[transport]

        yield fleet


@pytest.mark.parametrize("cell", CUT, ids=str)
def test_cell(over: Callable[[Transport], Matrix], cell: Cell) -> None:
    assert cell in CELLS
    if cell.fault in PARTITIONS and why_no_namespaces():
        pytest.skip(f"no network namespaces: {why_no_namespaces()}")
    matrix = over(cell.transport)
    with matrix.mended():
        print(matrix.run(cell))
