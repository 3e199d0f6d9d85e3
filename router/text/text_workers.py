"""Threads for work on texts that are too long for the event loop, so that streams go on meanwhile.

    up to INLINE_CHARS     at once, on the loop: less time than the way to another thread and back is worth
    up to MEDIUM_CHARS     on a thread of its own kind, so that it does not wait for long ones
    longer                 on `num_long` threads; more of them wait in line
    answers to be worded   on a thread of their own, so that no prompt waits for them

A batch goes to the end of the line after each of its items. Who is cancelled, because the client has gone, leaves
the line.
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
        self._wording = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wording")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work` on `num_chars` characters, or on what takes about as long."""
        if num_chars <= INLINE_CHARS:
            return work()
        threads = self._medium if num_chars <= MEDIUM_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def run_each(
        self, items: Sequence[S], num_chars: Callable[[S], int], work: Callable[[S], T]
    ) -> list[T]:
        """The result of `work` on each item. Short ones are taken together, as many as make a medium one."""
        sizes = [num_chars(item) for item in items]
        total, results = sum(sizes), list[T]()
        for part in _parts(items, sizes):
            # The kind of thread is by the whole: a long batch of short texts is not to hold up medium ones.
            results += await self.run(total, functools.partial(_each, work, part))
        return results

    async def word(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work` that makes an answer, and takes about as long as encoding `num_chars` characters."""
        if num_chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._wording, work)

    def close(self) -> None:
        """Let the threads end; what has not begun is dropped."""
        for threads in (self._medium, self._long, self._wording):
            threads.shutdown(wait=False, cancel_futures=True)


def _each(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    return [work(item) for item in items]


def _parts(items: Sequence[S], sizes: Sequence[int]) -> Iterator[Sequence[S]]:
    """Consecutive items of at most MEDIUM_CHARS together, or one that is longer."""
    begin, held = 0, 0
    for at, size in enumerate(sizes):
        if at > begin and held + size > MEDIUM_CHARS:
            yield items[begin:at]
            begin, held = at, 0
        held += size
    if begin < len(items):
        yield items[begin:]
