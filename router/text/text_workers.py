"""Threads for work on texts that are too long for the event loop, so that streams continue meanwhile.

    up to INLINE_CHARS   on the event loop, since passing it to a thread would take longer
    up to MEDIUM_CHARS   on one thread, so that it does not wait for longer texts
    longer               on `num_long` threads; further work waits in their queue

A batch queues again after each of its items. Work that is cancelled, because its client has gone, leaves the queue.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

INLINE_CHARS = 2000
"""A character takes about 1.3 us to encode (2 cores)."""
MEDIUM_CHARS = 32_768
_MAX_LONG_THREADS = 4


class TextWorkers:
    """Runs work that releases the GIL. Encoding and decoding do, and Python code does every few milliseconds."""

    def __init__(self, num_long: int | None = None) -> None:
        """`num_long` is by default half of the cores, and at most 4."""
        self.num_long = num_long or max(1, min(_MAX_LONG_THREADS, (os.cpu_count() or 1) // 2))
        self._medium = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(max_workers=self.num_long, thread_name_prefix="long-text")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work`, which takes about as long as encoding `num_chars` characters."""
        if num_chars <= INLINE_CHARS:
            return work()
        threads = self._medium if num_chars <= MEDIUM_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def run_each(
        self, items: Sequence[S], num_chars: Callable[[S], int], work: Callable[[S], T]
    ) -> list[T]:
        """The result of `work` on each item. Short items are run together, up to MEDIUM_CHARS."""
        sizes = [num_chars(item) for item in items]
        total, results = sum(sizes), list[T]()
        for part in _parts(items, sizes):
            # The threads are chosen by the batch's total, so that a long batch of short texts delays no medium ones.
            results += await self.run(total, functools.partial(_each, work, part))
        return results

    def close(self) -> None:
        """End the threads. Work that has not begun is dropped."""
        for threads in (self._medium, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


def _each(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    return [work(item) for item in items]


def _parts(items: Sequence[S], sizes: Sequence[int]) -> Iterator[Sequence[S]]:
    """Consecutive items of at most MEDIUM_CHARS together, or a single longer one."""
    begin, held = 0, 0
    for at, size in enumerate(sizes):
        if at > begin and held + size > MEDIUM_CHARS:
            yield items[begin:at]
            begin, held = at, 0
        held += size
    if begin < len(items):
        yield items[begin:]
