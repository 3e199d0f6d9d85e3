"""A request's place in its grammar: a function of its output tokens and nothing else.

So it needs no place in any message, and survives whatever happens to a request: the node that takes it over, or
computes it again, replays the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.grammar.backend import CompiledGrammar


class GrammarState:
    """Follows the output tokens that are known on the host; those in flight come when they are committed."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._matcher = compiled.new_matcher()
        self._num_accepted = 0
        self.vocab_size = compiled.vocab_size

    @property
    def is_terminated(self) -> bool:
        """True once the output has ended as the grammar wants it."""
        return self._matcher.is_terminated

    def accept(self, token_id: int) -> bool:
        """The next output token; False where the grammar does not allow it, and then it is not counted."""
        accepted = self._matcher.accept(token_id)
        self._num_accepted += accepted
        return accepted

    def follow(self, ids: Sequence[int], num_input_ids: int) -> bool:
        """Accept the outputs in `ids` (prompt and outputs) that are new since the last call; False if one is refused.

        Outputs only ever grow, so their number tells which are new: all of a retry, the first token of a handoff.
        """
        return all(self.accept(ids[i]) for i in range(num_input_ids + self._num_accepted, len(ids)))

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """Write which tokens may come next; see GrammarMatcher."""
        self._matcher.fill_mask(mask_GW, row)
