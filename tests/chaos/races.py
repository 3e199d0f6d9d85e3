"""Thousands of schedules of a GPU's streams (tests/sim/streams), of which none may show a race."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import torch
from hypothesis import Phase, given, seed, settings

from tests.sim.streams import fleet
from tests.sim.streams.scenarios import scenarios

NUM_EXAMPLES = 500
NUM_ROUNDS = 10


def run_round(number: int) -> Counter[str]:
    """NUM_EXAMPLES scenarios, counted by what happened in them."""
    counts: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, phases=[Phase.generate, Phase.shrink])
    @given(scenarios())
    def check(scenario: fleet.Scenario) -> None:
        counts.update(happening.kind for happening in scenario.happenings)
        assert fleet.run(scenario) == []

    check()
    return counts


def run() -> Iterator[dict[str, object]]:
    """Rounds of their own seeds."""
    torch.set_num_threads(1)
    for number in range(NUM_ROUNDS):
        start = time.monotonic()
        counts = run_round(number)
        yield {
            "round": number,
            "scenarios": NUM_EXAMPLES,
            **counts,
            "seconds": round(time.monotonic() - start, 1),
        }
