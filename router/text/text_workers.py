"""Threads for work on texts that are too long for the event loop, so that streams go on meanwhile.

    up to INLINE_CHARS     at once, on the loop: less time than the way to another thread and back is worth
    up to MEDIUM_CHARS     on a thread of its own kind, so that it does not wait for long ones
    longer                 on `num_long` threads; more of them wait in line

Who is cancelled, because the client has gone, leaves the line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_CHARS = 2000
"""About 1.3 us each to encode (2 cores)."""
MEDIUM_CHARS = 32_768
_MOST_LONG = 4


class TextWorkers:
    """What they run should let the GIL go: encoding and decoding do, Python code does every few milliseconds."""

    def __init__(self, num_long: int | None = None) -> None:
        """`num_long` is by default half of the cores, and at most 4."""
        self.num_long = num_long or max(1, min(_MOST_LONG, (os.cpu_count() or 1) // 2))
        self._medium = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(max_workers=self.num_long, thread_name_prefix="long-text")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work` on `num_chars` characters, or on what takes about as long."""
        if num_chars <= INLINE_CHARS:
            return work()
        threads = self._medium if num_chars <= MEDIUM_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """Let the threads end; what has not begun is dropped."""
        for threads in (self._medium, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
