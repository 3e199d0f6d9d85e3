"""How far a node has come, for the control thread, which answers pings while the others compute."""

from __future__ import annotations

import numpy as np


class Progress:
    """Counts layers computed and steps planned, so that silence can be told from a long forward.

    The forward stream counts layers, the scheduler steps, and the control thread reads.
    """

    def __init__(self) -> None:
        self.layers = np.zeros(1, dtype=np.int64)
        """In memory, where native code finds it."""
        self.steps = 0

    @property
    def count(self) -> int:
        """Layers and steps together."""
        return int(self.layers[0]) + self.steps
