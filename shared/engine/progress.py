"""How far a node has come, for the control thread, which answers pings while the others compute."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

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
        self._queued: deque[tuple[Callable[[], bool], int]] = deque()
        """Layers on a GPU, in launch order, each with what says that they are computed."""
        self._num_computed = 0
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Layers and turns together."""
        with self._lock:
            self._count_computed()
            return int(self.layers[0]) + self._num_computed + self.turns

    def queued(self, num_layers: int, is_computed: Callable[[], bool]) -> None:
        """Count layers once `is_computed`, which any thread may call. A queued layer that never runs is none."""
        with self._lock:
            self._count_computed()
            self._queued.append((is_computed, num_layers))

    def _count_computed(self) -> None:
        while self._queued and self._queued[0][0]():
            self._num_computed += self._queued.popleft()[1]
