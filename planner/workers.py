"""Processes that simulate. They end with the process that started them, however that ends, and leave Ctrl-C to it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection, wait

from planner.sample import Setting, Trial
from planner.simulate import Run


class WorkerDied(Exception):
    """A process that simulated has ended: killed from outside, or out of memory."""


@asynccontextmanager
async def simulating(
    setting: Setting, num_processes: int
) -> AsyncIterator[Callable[[Trial], Awaitable[Run]]]:
    """`async with simulating(setting, n) as run: run = await run(trial)`, which may raise WorkerDied.

    At its end the processes end as well, in the middle of what they do if they do anything.
    """
    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)  # ours closes at the end, and if this process is killed
    # They inherit that Ctrl-C is ignored, so that not even one that still starts shows a traceback.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(num_processes, spawn, _begin, (setting, theirs))
    for future in [pool.submit(os.getpid) for _ in range(num_processes)]:
        future.add_done_callback(lambda future: future.exception())
    signal.signal(signal.SIGINT, on_interrupt)

    async def run(trial: Trial) -> Run:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, _simulate, trial)
        except BrokenProcessPool:
            raise WorkerDied("a process ended while it simulated; was it out of memory?") from None

    try:
        yield run
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        theirs.close()


_setting: Setting
"""Of a process that simulates."""


def _begin(setting: Setting, parent: Connection) -> None:
    global _setting
    _setting = setting
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent: Connection) -> None:
    wait([parent])
    os._exit(1)


def _simulate(trial: Trial) -> Run:
    return _setting.run(trial)
