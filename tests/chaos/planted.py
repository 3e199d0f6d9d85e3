"""Every planted fault (tests/fault/matrix/plants.py): the matrix finds it in the cell that is meant to."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fault.matrix.cells import Transport
from tests.fault.matrix.matrix import Matrix
from tests.fault.matrix.plants import PLANTS
from tests.modelzoo import make_model

PLANTED_PATIENCE_S = 30.0
"""What has not come back by then is lost: that is how some faults are found."""


def run() -> Iterator[dict[str, object]]:
    """One after the other, on a fleet that is started anew behind each."""
    missed = []
    with tempfile.TemporaryDirectory(prefix="baton-planted-") as name:
        folder = Path(name)
        model = make_model(folder / "model", "llama", num_hidden_layers=4)
        with Matrix(folder / "fleet", model, Transport.SHM, patience_s=PLANTED_PATIENCE_S) as matrix:
            for plant in PLANTS.values():
                start = time.monotonic()
                found = matrix.find(plant)
                seconds = round(time.monotonic() - start, 1)
                yield {"planted": plant.name, "found": found and found[:200], "seconds": seconds}
                if found is None:
                    missed.append(plant.name)
    assert not missed, missed
