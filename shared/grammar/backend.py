"""The Protocols of a grammar backend. Each backend has a file of its own, and only that file imports its library."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shared.protocol.sampling_params import Grammar


class GrammarMatcher(Protocol):
    """The position of one sequence in its grammar. One thread at a time uses it."""

    @property
    def is_terminated(self) -> bool:
        """True once an end of sequence was accepted. No token may follow it."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False, without a change, where the grammar does not allow it."""
        ...

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """Write which tokens may come next: bit i % 32 of int32 word i // 32 is token i. Not once terminated."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokenize the text that must come next. Empty where more than one text may follow.

        The result depends on the accepted tokens only, and the matcher does not change. `accept` may refuse a token
        of it.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar compiled for one tokenizer. All requests with this grammar share it, on any thread."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the model, which may have more ids than its tokenizer."""
        ...

    def new_matcher(self) -> GrammarMatcher:
        """Return a matcher at the beginning of the grammar."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one model, with a cache. Several threads may call it at the same time."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar. Raises RequestError with the message of the compiler."""
        ...
