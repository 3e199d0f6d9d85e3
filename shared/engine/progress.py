"""How far a node has come, for the control thread, which answers pings while the others compute."""

from __future__ import annotations

import numpy as np


class Progress:
    """Counts layers computed and turns of the loop, so that a loop that hangs can be told from a long forward.

    The forward stream counts layers, the scheduler its turns, and the control thread reads.
    """

    def __init__(self) -> None:
        self.layers = np.zeros(1, dtype=np.int64)
        """In memory, where native code finds it."""
        self.turns = 0
        """An idle loop takes a turn every `node_process.IDLE_WAIT_S`."""

    @property
    def count(self) -> int:
        """Layers and turns together."""
        return int(self.layers[0]) + self.turns
