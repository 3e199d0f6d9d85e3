"""Plants faults, one at a time, and says whether the matrix finds each by what the fault does."""

from __future__ import annotations

import re

from tests.fault.matrix.matrix import Matrix
from tests.fault.matrix.plants import Plant
from tests.patience import until


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
