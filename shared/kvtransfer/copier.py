"""Who gathers pages into staging slots: a thread beside the link's, so that gathering hides behind sending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol


class Copier(Protocol):
    """Runs copies one at a time, in the order of their submission. A copy does not raise."""

    def submit(self, copy: Callable[[], None], /) -> Any:
        """Have `copy` run. Any thread; must not block."""
        ...

    def shutdown(self, wait: bool = True) -> None:
        """Nothing more will be submitted."""
        ...


def thread_copier(name: str, on_start: Callable[[], None] | None = None) -> Copier:
    """A thread of its own, started by the first copy, with `on_start` called on it."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"copier {name}", initializer=on_start)
