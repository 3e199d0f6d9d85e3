"""How tests wait: until something holds, however slow the machine is. No test proves anything by seconds."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")

PATIENCE_S = 300.0
"""After this time a test that hangs ends. A test that can pass never waits so long, on any machine."""

_POLL_S = 0.01


def until(holds: Callable[[], T], what: object = "", patience_s: float = PATIENCE_S) -> T:
    """The first true answer of `holds`. Fails with its last answer and `what`, which may be a function."""
    give_up_at = time.monotonic() + patience_s
    while not (answer := holds()):
        assert time.monotonic() < give_up_at, _never(what, answer, patience_s)
        time.sleep(_POLL_S)
    return answer


async def eventually(holds: Callable[[], T | Awaitable[T]], what: object = "") -> T:
    """As `until`, while the event loop runs. `holds` may be a coroutine function."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        answer = holds()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return cast("T", answer)
        assert time.monotonic() < give_up_at, _never(what, answer, PATIENCE_S)
        await asyncio.sleep(_POLL_S)


def _never(what: object, answer: object, patience_s: float) -> str:
    return f"not within {patience_s:g} s: {what() if callable(what) else what} (last: {answer!r})"
