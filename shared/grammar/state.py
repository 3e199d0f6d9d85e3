"""A request's place in its grammar: a function of its output tokens and nothing else.

So it needs no place in any message, and survives whatever happens to a request: the node that takes it over, or
computes it again, replays the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from shared.grammar.backend import CompiledGrammar
from shared.grammar.step_budget import StepBudget
from shared.timeline import Clock


class GrammarState:
    """Follows the output tokens that are known on the host; those in flight come when they are committed."""

    def __init__(
        self, compiled: CompiledGrammar, *, jump_forward: bool = False, cpu_clock: Clock = time.thread_time
    ) -> None:
        """`cpu_clock` tells the CPU time of the calling thread, so that a busy machine makes no grammar slow."""
        self._matcher = compiled.new_matcher()
        self._cpu_clock = cpu_clock
        self._budget = StepBudget()
        self._num_accepted = 0
        self._jump_forward = jump_forward
        self.vocab_size = compiled.vocab_size

    @property
    def is_terminated(self) -> bool:
        """True once the output has ended as the grammar wants it."""
        return self._matcher.is_terminated

    @property
    def is_too_slow(self) -> bool:
        """True once following the grammar has taken more CPU time than a request is given."""
        return self._budget.is_exhausted

    def accept(self, token_id: int) -> bool:
        """The next output token; False where the grammar does not allow it, and then it is not counted."""
        began = self._cpu_clock()
        accepted = self._matcher.accept(token_id)
        self._budget.charge(self._cpu_clock() - began)
        self._budget.end_step()
        self._num_accepted += accepted
        return accepted

    def follow(self, ids: Sequence[int], num_input_ids: int) -> bool:
        """Accept the outputs in `ids` (prompt and outputs) that are new since the last call; False if one is refused.

        Outputs only ever grow, so their number tells which are new: all of a retry, the first token of a handoff.
        """
        return all(self.accept(ids[i]) for i in range(num_input_ids + self._num_accepted, len(ids)))

    def forced_tokens(self) -> list[int]:
        """Tokens that may follow without being sampled: nothing without jump-forward, nor once terminated.

        Of the text that must come next, all but the last token of its spelling: that one might be the beginning
        of a longer token, which the model is to choose.
        """
        if not self._jump_forward or self.is_terminated:
            return []
        began = self._cpu_clock()
        tokens = self._matcher.forced_tokens()[:-1]
        self._budget.charge(self._cpu_clock() - began)
        return tokens

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """Write which tokens may come next; see GrammarMatcher."""
        began = self._cpu_clock()
        self._matcher.fill_mask(mask_GW, row)
        self._budget.charge(self._cpu_clock() - began)
