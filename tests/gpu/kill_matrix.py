"""A cut of the kill matrix on one GPU: a prefill node and two decode nodes, which are killed in their stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device import device
from tests.fault.matrix.cells import Cell, Fault
from tests.fault.matrix.fleet_nodes import Computing, Model, computing_here, make_served
from tests.fault.matrix.holding import Stage
from tests.fault.matrix.matrix import Matrix

ON_A_GPU = device().type == "cuda"
TRANSPORT = "cuda-ipc" if ON_A_GPU else "shm"
GPU = Computing(
    (
        *("--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "triton", "--exact"),
        *("--cuda-graph-max-bs", "8", "--mem-fraction-static", "0.2", "--kv-cache-dtype", "int8"),
    ),
    0,
)
CUT = (
    (Fault.NONE, Stage.STREAMING),
    (Fault.PREFILL_KILLED, Stage.TRANSFERRING),
    (Fault.DECODE_KILLED, Stage.STREAMING),
    (Fault.DECODE_KILLED, Stage.MOVING),
    (Fault.PREFILL_STOPPED, Stage.TRANSFERRING),
    (Fault.CLIENT_GONE, Stage.TRANSFERRING),
)
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    root = tmp_path_factory.mktemp("matrix")
    model = make_served(root / "model", Model.DENSE, head_dim=64)
    computing = GPU if ON_A_GPU else computing_here()
    with Matrix(root / "fleet", model, TRANSPORT, computing=computing, patience_s=PATIENCE_S) as matrix:
        yield matrix
        matrix.fleet.stop()


@pytest.mark.parametrize(("fault", "stage"), CUT, ids=[f"{fault}, {stage}" for fault, stage in CUT])
def test_kill_matrix(matrix: Matrix, fault: Fault, stage: Stage) -> None:
    with matrix.mended():
        print(matrix.run(Cell(fault, stage, TRANSPORT)))
