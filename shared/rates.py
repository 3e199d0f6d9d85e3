"""Work done per second: as it was measured, and what is believed before."""

from __future__ import annotations

PRIOR_PREFILL_TOKENS_PER_S = 2_000.0
PRIOR_TRANSFER_BYTES_PER_S = 1e9
"""Believed until something was measured; a few measurements outweigh them."""
PRIOR_WEIGHT_S = 0.01
DECAY = 0.9
"""What is left of a measurement's weight with each later one: about the last ten count."""


class MovingRate:
    """Work done per second, as a moving average of sums, so that long measurements count for more than short ones."""

    def __init__(self, prior: float) -> None:
        self._work = prior * PRIOR_WEIGHT_S
        self._seconds = PRIOR_WEIGHT_S
        self._is_measured = False

    @property
    def per_second(self) -> float:
        """The present estimate; always positive."""
        return self._work / self._seconds

    @property
    def measured(self) -> float:
        """The present estimate; 0 until something was measured."""
        return self.per_second if self._is_measured else 0.0

    def observe(self, work: float, seconds: float) -> None:
        """`work` took `seconds`. A measurement of no time or no work is ignored."""
        if work <= 0 or seconds <= 0:
            return
        self._is_measured = True
        self._work = self._work * DECAY + work
        self._seconds = self._seconds * DECAY + seconds
