"""The kill matrix finds planted faults. `make chaos ARGS=planted` plants those too that last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault.matrix.cells import Transport
from tests.fault.matrix.finding import find
from tests.fault.matrix.fleet_nodes import Model, make_served
from tests.fault.matrix.matrix import Matrix
from tests.fault.matrix.plants import PLANTS, Plant

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("planted")
    with Matrix(folder, make_served(folder / "model", Model.MIXTURE), Transport.SHM) as matrix:
        yield matrix
        matrix.fleet.stop()


@pytest.mark.parametrize(
    "plant", [plant for plant in PLANTS.values() if not plant.lasts], ids=lambda p: p.name
)
def test_is_found(matrix: Matrix, plant: Plant) -> None:
    print(find(matrix, plant))
    with matrix.mended():
        matrix.flush()
        matrix.check_home()
