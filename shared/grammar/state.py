"""The position of a request in its grammar, and a bound on the CPU time that following the grammar takes.

The position depends on the output tokens only, so it is not part of any message. A node that takes a request over, or
computes it again, replays the tokens.

Grammars are followed on the scheduler thread, and every request of the node waits meanwhile. Even a small grammar
may be slow to follow. A mask of an ambiguous grammar can take seconds, or longer with every token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from shared.errors import RequestError
from shared.grammar.backend import CompiledGrammar
from shared.timeline import Clock

FREE_STEP_S = 0.05
"""CPU time that each step may take. A usual step takes 0.01 to 0.5 ms. With a vocabulary of 128,000 tokens, on one
slow core, a step in an object of 200 optional properties takes 20 ms."""
MAX_OWED_S = 0.25
"""Most CPU time above FREE_STEP_S that a request may owe. Quicker steps pay it back."""


class StepBudget:
    """A leaky bucket of CPU time for one request. A step is one accepted token and one mask."""

    def __init__(self) -> None:
        self._owed_s = 0.0
        self.is_exhausted = False

    def charge(self, seconds: float) -> None:
        """Add CPU time that was spent. The budget is exhausted for good once more than MAX_OWED_S is owed."""
        self._owed_s += seconds
        self.is_exhausted |= self._owed_s > MAX_OWED_S

    def end_step(self) -> None:
        """Pay back FREE_STEP_S."""
        self._owed_s = max(0.0, self._owed_s - FREE_STEP_S)


class GrammarState:
    """Follows the output tokens that are known on the host. Tokens in flight are followed when they are committed."""

    def __init__(
        self, compiled: CompiledGrammar, *, jump_forward: bool = False, cpu_clock: Clock = time.thread_time
    ) -> None:
        """`cpu_clock` is the CPU time of the calling thread, so that no grammar is too slow on a busy machine."""
        self._matcher = compiled.new_matcher()
        self._cpu_clock = cpu_clock
        self._budget = StepBudget()
        self._num_accepted = 0
        self._jump_forward = jump_forward
        self.vocab_size = compiled.vocab_size

    @property
    def is_terminated(self) -> bool:
        """True once the output has ended as the grammar demands."""
        return self._matcher.is_terminated

    @property
    def is_too_slow(self) -> bool:
        """True once following the grammar has exhausted the budget."""
        return self._budget.is_exhausted

    def accept(self, token_id: int) -> bool:
        """Follow the next output token. False where the grammar does not allow it. Then the token is not counted."""
        began = self._cpu_clock()
        accepted = self._matcher.accept(token_id)
        self._budget.charge(self._cpu_clock() - began)
        self._budget.end_step()
        self._num_accepted += accepted
        return accepted

    def follow(self, ids: Sequence[int], num_input_ids: int) -> bool:
        """Follow the outputs in `ids` (prompt and outputs) that are new since the last call. False if one is refused.

        Outputs are only appended, so their number says which ones are new.
        """
        return all(self.accept(ids[i]) for i in range(num_input_ids + self._num_accepted, len(ids)))

    def forced_tokens(self) -> list[int]:
        """Return the tokens that may follow without being sampled. Empty without jump-forward, and once terminated.

        They are the tokens of the text that must come next, without the last token. That one might be the beginning
        of a longer token, so the model samples it.
        """
        if not self._jump_forward or self.is_terminated:
            return []
        began = self._cpu_clock()
        tokens = self._matcher.forced_tokens()[:-1]
        self._budget.charge(self._cpu_clock() - began)
        return tokens

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """Write which tokens may come next, as `GrammarMatcher.fill_mask` does."""
        began = self._cpu_clock()
        self._matcher.fill_mask(mask_GW, row)
        self._budget.charge(self._cpu_clock() - began)


def too_slow_error(kind: str) -> RequestError:
    """The error of a request whose budget is exhausted. `kind` is the request field of the grammar."""
    return RequestError(
        f"{kind}: following this grammar takes too long (over {MAX_OWED_S:g} s of CPU time for one token, or over "
        f"{FREE_STEP_S:g} s for many); make it simpler or less ambiguous",
        param=kind,
    )
