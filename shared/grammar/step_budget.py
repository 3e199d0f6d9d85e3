"""Bounds the CPU time that a grammar takes on the scheduler's thread, where every request of a node waits for it.

A small grammar may be slow to follow: masks of an ambiguous one can take seconds, or take longer with every token.
"""

from __future__ import annotations

from shared.errors import RequestError

FREE_STEP_S = 0.05
"""A step may take so long at any length of output. A usual one takes 0.01 to 0.5 ms; with 128,000 tokens, on one slow
core, one in an object of 200 optional properties takes 20 ms."""
MAX_OWED_S = 0.25
"""What steps took above FREE_STEP_S is owed, and paid back by quicker ones; no request may owe more than this."""


class StepBudget:
    """Of one request: a leaky bucket of CPU time. A step is one accepted token and one mask."""

    def __init__(self) -> None:
        self._owed_s = 0.0
        self.is_exhausted = False

    def charge(self, seconds: float) -> None:
        """So much was spent; exhausts the budget for good once too much is owed."""
        self._owed_s += seconds
        self.is_exhausted |= self._owed_s > MAX_OWED_S

    def end_step(self) -> None:
        """One more token: it has brought its allowance."""
        self._owed_s = max(0.0, self._owed_s - FREE_STEP_S)


def too_slow(kind: str) -> RequestError:
    """What the client of an exhausted budget is told; `kind` names the grammar's field."""
    return RequestError(
        f"{kind}: following this grammar takes too long (over {MAX_OWED_S:g} s of CPU time for one token, or over "
        f"{FREE_STEP_S:g} s for many); make it simpler or less ambiguous",
        param=kind,
    )
