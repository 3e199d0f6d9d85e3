"""What it costs to give a request's KV up and to have it again: by copying, or by computing it anew."""

from __future__ import annotations

PRIOR_PREFILL_TOKENS_PER_S = 2_000.0
PRIOR_COPY_BYTES_PER_S = 4e9
"""Believed until something was measured; a few measurements outweigh them."""
PRIOR_WEIGHT_S = 0.01
DECAY = 0.9
"""What is left of a measurement's weight with each later one: about the last ten count."""


class MovingRate:
    """Work done per second, as a moving average of sums, so that long measurements count for more than short ones."""

    def __init__(self, prior: float) -> None:
        self._work = prior * PRIOR_WEIGHT_S
        self._seconds = PRIOR_WEIGHT_S

    @property
    def per_second(self) -> float:
        """The present estimate; always positive."""
        return self._work / self._seconds

    def observe(self, work: float, seconds: float) -> None:
        """`work` took `seconds`. What took no measurable time says nothing."""
        if work <= 0 or seconds <= 0:
            return
        self._work = self._work * DECAY + work
        self._seconds = self._seconds * DECAY + seconds


class RetractCosts:
    """Seconds of each way out, for one victim. Knows no clock: those who have one tell it what they measured.

    Where several ranks plan together, one of them would have to tell the others its estimates.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self.prefill = MovingRate(PRIOR_PREFILL_TOKENS_PER_S)
        """Tokens a second of this node's own prefills."""
        self.copy = MovingRate(PRIOR_COPY_BYTES_PER_S)
        """Bytes a second between the device and the host."""

    def observe_copy(self, num_pages: int, seconds: float) -> None:
        """Pages were copied out, or back."""
        self.copy.observe(num_pages * self._page_nbytes, seconds)

    def host_s(self, num_pages_out: int, num_pages_back: int) -> float:
        """Copy pages to the host now, and those that are lost here meanwhile back later."""
        return (num_pages_out + num_pages_back) * self._page_nbytes / self.copy.per_second

    def recompute_s(self, num_tokens: int) -> float:
        """Prefill the tokens that the RadixCache will not have."""
        return num_tokens / self.prefill.per_second
