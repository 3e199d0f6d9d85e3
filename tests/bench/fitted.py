"""The cost model that benches of the simulator use: that of a recorded profile."""

from __future__ import annotations

from pathlib import Path

from planner.cost_model import CostModel
from planner.profile import load_profile

FITTED = Path(__file__).with_name("profile.json")
"""Of `router plan --measure` with every default."""


def load_cost_model(path: Path = FITTED) -> CostModel:
    """What forwards cost in a profile."""
    return load_profile(path).forward
