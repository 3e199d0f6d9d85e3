"""How tests wait: until something holds, however slow the machine is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0
"""Ends a test that hangs, and proves nothing: no test may depend on it."""


def until(holds: Callable[[], T], what: object = "", *, every_s: float = 0.01) -> T:
    """The first true answer of `holds`. Fails with its last answer and `what`, which may be a function."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not (answer := holds()):
        assert time.monotonic() < give_up_at, _never(what, answer)
        time.sleep(every_s)
    return answer


async def eventually(holds: Callable[[], T], what: object = "", *, every_s: float = 0.01) -> T:
    """As `until`, for tests whose event loop must run meanwhile."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not (answer := holds()):
        assert time.monotonic() < give_up_at, _never(what, answer)
        await asyncio.sleep(every_s)
    return answer


def _never(what: object, answer: object) -> str:
    return f"never within {PATIENCE_S:g} s: {what() if callable(what) else what} (last: {answer!r})"
