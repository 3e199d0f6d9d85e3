"""Every planted fault (tests/fault/matrix/plants.py): the matrix finds it, by what it does."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fault.matrix.cells import Transport
from tests.fault.matrix.fleet_nodes import Model, make_served
from tests.fault.matrix.matrix import Matrix
from tests.fault.matrix.plants import PLANTS, Plant
from tests.patience import until
from tests.processes import print_logs

PLANTED_PATIENCE_S = 30.0
"""What has not come back by then is lost: that is how some faults are found."""


def run(model: str = Model.MIXTURE) -> Iterator[dict[str, object]]:
    """One after the other, on a fleet that must be whole again behind each; `model` names a `Model`."""
    missed = {}
    plants = [plant for plant in PLANTS.values() if model == Model.MIXTURE or not plant.of_windows]
    with tempfile.TemporaryDirectory(prefix="baton-planted-") as name:
        folder = Path(name)
        served = make_served(folder / "model", Model(model))
        with Matrix(folder / "fleet", served, Transport.SHM, patience_s=PLANTED_PATIENCE_S) as matrix:
            for plant in plants:
                start = time.monotonic()
                found = ""
                try:
                    found = find(matrix, plant)
                except AssertionError as error:
                    print_logs(*matrix.fleet.processes)
                    missed[plant.name] = str(error)
                seconds = round(time.monotonic() - start, 1)
                yield {"planted": plant.name, "found": found[:200], "seconds": seconds}
                if plant.lasts or not found:
                    matrix.renew()
                matrix.flush()
                matrix.check_home()
    assert not missed, missed


def find(matrix: Matrix, plant: Plant) -> str:
    """What the matrix finds wrong while `plant` acts. AssertionError: nothing, or something else.

    The fault no longer acts afterwards; what it has done to the fleet may last.
    """
    starts = {process.name: len(process.log) for process in matrix.fleet.processes}
    matrix.flush()
    matrix.plant(plant)
    try:
        if plant.cell is None:
            matrix.check_home()
        else:
            matrix.run(plant.cell)
    except AssertionError as error:
        found = str(error)
    else:
        raise AssertionError(f"{plant.name}: nothing was found")
    finally:
        matrix.plant(None)
    assert re.search(plant.finding, found), f"{plant.name}: something else was found: {found}"

    def is_logged() -> bool:
        processes = matrix.fleet.processes
        return any(re.search(plant.logged, process.log[starts[process.name] :]) for process in processes)

    until(is_logged, f"{plant.name}: a log has {plant.logged!r}", matrix.patience_s)
    return found
