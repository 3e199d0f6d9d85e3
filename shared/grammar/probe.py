"""Tries a compiled grammar before requests follow it, on the thread that compiled it."""

from __future__ import annotations

import random

import numpy as np

from shared.grammar.backend import CompiledGrammar
from shared.grammar.state import GrammarState
from shared.grammar.step_budget import too_slow
from shared.timeline import Clock

NUM_STEPS = 64
"""Enough for what grows with every token: costs that double every few tokens pass the limit on the way."""


def probe(compiled: CompiledGrammar, kind: str, cpu_clock: Clock) -> None:
    """Follow random texts for NUM_STEPS tokens, the same ones each time. Raises RequestError where that is too slow.

    It cannot see what is slow behind a longer text only: requests have a budget for that.
    """
    choices = random.Random(0)
    mask_1W = np.zeros((1, -(-compiled.vocab_size // 32)), dtype=np.int32)
    state = GrammarState(compiled, cpu_clock=cpu_clock)
    for _ in range(NUM_STEPS):
        if state.is_terminated:
            state = GrammarState(compiled, cpu_clock=cpu_clock)
        mask_1W.fill(0)
        state.fill_mask(mask_1W, 0)
        if state.is_too_slow:
            raise too_slow(kind)
        allowed = np.flatnonzero(
            np.unpackbits(mask_1W.view(np.uint8), bitorder="little")[: compiled.vocab_size]
        )
        if not allowed.size or not state.accept(int(allowed[choices.randrange(allowed.size)])):
            return  # no token of this model goes on: requests that come so far are told
        if state.is_too_slow:
            raise too_slow(kind)
