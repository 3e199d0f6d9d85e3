"""A grammar of the token engine: what may come next depends on every token before it, so a wrong replay shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shared.errors import RequestError
from shared.protocol.sampling_params import Grammar
from tests.token_engine import EOS, VOCAB_SIZE, next_token

ALL_IDS = np.arange(VOCAB_SIZE)


def token_grammar(modulus: int, length: int, run: int = 0) -> Grammar:
    """`length` tokens, each of which makes the sum of all divisible by `modulus`; then EOS.

    Here and there a text is forced that the "tokenizer" spells in `run` tokens. As with real grammars, other tokens
    would be allowed there as well.
    """
    return Grammar("regex", f"{modulus} {length} {run}")


class TokenMatcher:
    def __init__(self, modulus: int, length: int, run: int = 0) -> None:
        self.modulus = modulus
        self.length = length
        self.run = run
        self.accepted: list[int] = []
        self.is_terminated = False

    def allows(self, ids: np.ndarray) -> np.ndarray:
        """Which of these tokens may come next."""
        if self.is_terminated:
            return np.zeros_like(ids, dtype=bool)
        if len(self.accepted) == self.length:
            return ids == EOS
        return (ids != EOS) & ((sum(self.accepted) + ids) % self.modulus == 0)

    def accept(self, token_id: int) -> bool:
        if not self.allows(np.array([token_id])).all():
            return False
        self.accepted.append(token_id)
        self.is_terminated = token_id == EOS
        return True

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        assert not self.is_terminated
        allowed = np.zeros(32 * mask_GW.shape[1], dtype=bool)
        allowed[:VOCAB_SIZE] = self.allows(ALL_IDS)
        mask_GW[row] = np.packbits(allowed, bitorder="little").view(np.int32)

    def forced_tokens(self) -> list[int]:
        if next_token(self.accepted) % 2:
            return []
        at = len(self.accepted)
        places = range(at, min(at + self.run, self.length))
        return [self.modulus * (8 + (sum(self.accepted) + 31 * i) % 90) for i in places]


class TokenCompiled:
    vocab_size = VOCAB_SIZE

    def __init__(self, modulus: int, length: int, run: int = 0) -> None:
        self.modulus = modulus
        self.length = length
        self.run = run

    def new_matcher(self) -> TokenMatcher:
        return TokenMatcher(self.modulus, self.length, self.run)


class CpuTime:
    """A clock of CPU time that matchers move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class CostlyMatcher(TokenMatcher):
    """Takes so many seconds of `cpu` for what comes after so many tokens."""

    def __init__(self, compiled: CostlyCompiled) -> None:
        super().__init__(compiled.modulus, compiled.length)
        self.costs = compiled

    def accept(self, token_id: int) -> bool:
        self.costs.cpu.seconds += self.costs.accept_s(len(self.accepted))
        return super().accept(token_id)

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        self.costs.cpu.seconds += self.costs.mask_s(len(self.accepted))
        super().fill_mask(mask_GW, row)

    def forced_tokens(self) -> list[int]:
        self.costs.cpu.seconds += self.costs.forced_s
        return []


class CostlyCompiled(TokenCompiled):
    def __init__(
        self,
        cpu: CpuTime,
        *,
        length: int = 1000,
        accept_s: Callable[[int], float] = lambda _: 0.0,
        mask_s: Callable[[int], float] = lambda _: 0.0,
        forced_s: float = 0.0,
    ) -> None:
        super().__init__(3, length)
        self.cpu = cpu
        self.accept_s = accept_s
        self.mask_s = mask_s
        self.forced_s = forced_s

    def new_matcher(self) -> CostlyMatcher:
        return CostlyMatcher(self)


class TokenGrammarBackend:
    def compile(self, grammar: Grammar) -> TokenCompiled:
        try:
            modulus, length, run = map(int, grammar.text.split())
        except ValueError:
            raise RequestError(f"{grammar.kind}: not three numbers", param=grammar.kind) from None
        return TokenCompiled(modulus, length, run)


def constrained_tokens(
    input_ids: Sequence[int], max_new_tokens: int, modulus: int, length: int, run: int = 0
) -> list[int]:
    """What any schedule must produce; with `run`, where jump-forward is enabled."""
    entries = constrained_entries(input_ids, max_new_tokens, modulus, length, run)
    return [token for entry in entries for token in entry]


def constrained_entries(
    input_ids: Sequence[int], max_new_tokens: int, modulus: int, length: int, run: int
) -> list[list[int]]:
    """The same: each token that is sampled, with those jumped over after it."""
    ids, matcher = list(input_ids), TokenMatcher(modulus, length, run)
    entries: list[list[int]] = []
    while len(ids) - len(input_ids) < max_new_tokens and not matcher.is_terminated:
        from_next = np.roll(ALL_IDS, -next_token(ids))
        token = int(from_next[matcher.allows(from_next)][0])
        matcher.accept(token)
        room = max_new_tokens - (len(ids) - len(input_ids)) - 1
        forced = [] if matcher.is_terminated else matcher.forced_tokens()[:-1][:room]
        entries.append([token, *(forced if len(forced) >= 3 else [])])
        assert all(map(matcher.accept, entries[-1][1:]))
        ids += entries[-1]
    return entries
