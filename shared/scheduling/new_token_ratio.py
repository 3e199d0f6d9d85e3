"""How much of the output that running requests may still produce is worth reserving room for."""

from __future__ import annotations

from collections.abc import Sequence

from shared.scheduling.req import Req

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_LOOKAHEAD_TOKENS = 20


class NewTokenRatio:
    """Share of `max_new_tokens` that admission reserves for each running request; as in SGLang's scheduler.

    It falls a little with every decode step, since most requests stop early, and jumps back when a retraction
    shows that too many were admitted.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INIT_RATIO * conservativeness, 1.0)
        self._minimum = min(self._initial * MIN_RATIO_FACTOR, 1.0)
        self._decay = (self._initial - self._minimum) / DECAY_STEPS
        self.value = self._initial

    def decay(self) -> None:
        """A decode step went well."""
        self.value = max(self.value - self._decay, self._minimum)

    def reset(self) -> None:
        """Nothing runs: what was learnt no longer holds."""
        self.value = self._initial

    def rise_after_retraction(self, running: Sequence[Req]) -> None:
        """Reserve as much as the requests left have used so far, and a few tokens more."""
        wanted = sum(req.max_output_len for req in running)
        used = sum(req.num_sampled + RETRACT_LOOKAHEAD_TOKENS for req in running)
        self.value = max(self.value, min(used / max(wanted, 1), 1.0))
