"""A grammar of the token engine: what may come next depends on every token before it, so a wrong replay shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.errors import RequestError
from shared.protocol.sampling_params import Grammar
from tests.token_engine import EOS, VOCAB_SIZE, next_token


def token_grammar(modulus: int, length: int) -> Grammar:
    """`length` tokens, each of which makes the sum of all divisible by `modulus`; then EOS."""
    return Grammar("regex", f"{modulus} {length}")


class TokenMatcher:
    def __init__(self, modulus: int, length: int) -> None:
        self.modulus = modulus
        self.length = length
        self.accepted: list[int] = []
        self.is_terminated = False

    def allows(self, token_id: int) -> bool:
        if self.is_terminated:
            return False
        if len(self.accepted) == self.length:
            return token_id == EOS
        return token_id != EOS and (sum(self.accepted) + token_id) % self.modulus == 0

    def accept(self, token_id: int) -> bool:
        if not self.allows(token_id):
            return False
        self.accepted.append(token_id)
        self.is_terminated = token_id == EOS
        return True

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        assert not self.is_terminated
        mask_GW[row] = 0
        for token_id in filter(self.allows, range(VOCAB_SIZE)):
            mask_GW[row].view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


class TokenCompiled:
    vocab_size = VOCAB_SIZE

    def __init__(self, modulus: int, length: int, nbytes: int = 1) -> None:
        self.modulus = modulus
        self.length = length
        self.nbytes = nbytes

    def new_matcher(self) -> TokenMatcher:
        return TokenMatcher(self.modulus, self.length)


class TokenGrammarBackend:
    def compile(self, grammar: Grammar) -> TokenCompiled:
        try:
            modulus, length = map(int, grammar.text.split())
        except ValueError:
            raise RequestError(f"{grammar.kind}: not two numbers", param=grammar.kind) from None
        return TokenCompiled(modulus, length)


def constrained_tokens(input_ids: Sequence[int], max_new_tokens: int, modulus: int, length: int) -> list[int]:
    """What any schedule must produce."""
    ids, matcher = list(input_ids), TokenMatcher(modulus, length)
    while len(ids) - len(input_ids) < max_new_tokens and not matcher.is_terminated:
        token = next_token(ids)
        while not matcher.allows(token):
            token = (token + 1) % VOCAB_SIZE
        matcher.accept(token)
        ids.append(token)
    return ids[len(input_ids) :]
