"""The cost model that benches of the simulator use: that of a recorded profile."""

from __future__ import annotations

import json
from pathlib import Path

from planner.cost_model import CostModel

FITTED = Path(__file__).with_name("cost_model.json")


def load_cost_model(path: Path = FITTED) -> CostModel:
    """The fitted model; see `tests/bench/fit_cost_model.py`."""
    fitted = json.loads(path.read_text())
    return CostModel(**fitted["prefill"], **fitted["decode"])
