"""What a grammar backend does. One file for each backend; nobody else knows its library."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shared.protocol.sampling_params import Grammar


class GrammarMatcher(Protocol):
    """Where one sequence is in its grammar. Used by one thread at a time."""

    @property
    def is_terminated(self) -> bool:
        """True once an end of sequence was accepted: nothing may follow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and no change, where the grammar does not allow it."""
        ...

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """Write which tokens may come next: bit i % 32 of int32 word i // 32 is token i. Not once terminated."""
        ...

    def forced_tokens(self) -> list[int]:
        """The text that must come next, as the tokenizer spells it; empty where more than one text may follow.

        A function of the accepted tokens, and changes nothing. `accept` may still refuse any of them.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar, worked out for one tokenizer. Shared by all requests that name it, on any thread."""

    @property
    def vocab_size(self) -> int:
        """Of the model, which may have more ids than its tokenizer."""
        ...

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of the grammar."""
        ...


class GrammarBackend(Protocol):
    """Compiles for one model, and remembers what it has compiled. Several threads call it at a time."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Work a grammar out. Raises RequestError with the compiler's message."""
        ...
