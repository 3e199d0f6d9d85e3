"""What hypothesis draws: schedules, requests, and what happens to the fleet."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import Phase, find, settings
from hypothesis import strategies as st

from tests.sim.streams.device import Schedule
from tests.sim.streams.fleet import HAPPENINGS, Happening, Scenario

SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 2**16),
    eagerness=st.lists(st.sampled_from([0.0, 0.0, 0.3, 1.0]), max_size=5).map(tuple),
    interrupts=st.sampled_from([0.0, 0.3, 0.7]),
)


def happenings(*kinds: str, least: int = 1, most: int = 1) -> st.SearchStrategy[tuple[Happening, ...]]:
    """Some happenings of these kinds, while requests run."""
    one = st.builds(Happening, st.integers(2, 40), st.sampled_from(kinds), st.integers(0, 14))
    return st.lists(one, min_size=least, max_size=most, unique_by=lambda it: it.step).map(tuple)


def scenarios(**fixed: Any) -> st.SearchStrategy[Scenario]:
    """Scenarios of which `fixed` replaces some parts."""
    drawn: dict[str, Any] = {
        "schedule": SCHEDULES,
        "num_reqs": st.integers(1, 5),
        "overlap": st.booleans(),
        "tokens": st.sampled_from([48, 64, 128]),
        "retract_every": st.sampled_from([0, 5]),
        "happenings": happenings(*HAPPENINGS, least=0, most=2),
    }
    return st.builds(Scenario, **drawn | fixed)


def first_of(drawn: st.SearchStrategy[Scenario], shows: Callable[[Scenario], bool]) -> Scenario:
    """The first scenario of at most 200 that `shows` something. Raises NoSuchExample."""
    once = settings(max_examples=200, phases=[Phase.generate], database=None, deadline=None)
    return find(drawn, shows, settings=once, random=random.Random(0))
