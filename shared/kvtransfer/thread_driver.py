"""Steps a loop on a thread of its own."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

from shared.kvtransfer.link import Stepped


class ThreadDriver:
    """A daemon thread, so that an op stuck in a dead peer never keeps the process from ending."""

    def __init__(
        self, name: str, loop: Stepped, context: AbstractContextManager[object] | None = None
    ) -> None:
        self._loop = loop
        self._context = context or nullcontext()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._context:
            while not self._loop.finished:
                self._loop.step(block=True)

    def join(self, timeout_s: float) -> bool:
        """See Driver."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
