"""Processes that simulate. They end with the process that started them, however that ends, and leave Ctrl-C to it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from types import TracebackType

from planner.plan_trials import Setting, Trial
from planner.simulate import Run
from shared.errors import ConfigError


class WorkerDied(Exception):
    """A process that simulated has ended: killed from outside, or out of memory."""


class Workers:
    """`async with Workers(setting, n) as workers: run = await workers.run(trial)`."""

    def __init__(self, setting: Setting, num_processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._processes = []
        self._pipes: list[Connection] = []
        # They inherit that Ctrl-C is ignored, so that not even one that still starts shows a traceback.
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(num_processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(theirs, setting), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._idle.put(ours)
        signal.signal(signal.SIGINT, on_interrupt)
        self._threads = ThreadPoolExecutor(num_processes, "worker")

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, in the middle of what they do if they do anything."""
        for process in self._processes:
            process.terminate()
        self._threads.shutdown(cancel_futures=True)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()

    async def run(self, trial: Trial) -> Run:
        """Simulate it when a process is free. Raises what `simulate` raises there, and WorkerDied."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, trial)

    def _ask(self, trial: Trial) -> Run:
        pipe = self._idle.get()
        try:
            pipe.send(trial)
            answer = pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(
                f"a process ended while it simulated {trial.option.name}; was it out of memory?"
            ) from None
        finally:
            self._idle.put(pipe)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Run)
        return answer


def _work(pipe: Connection, setting: Setting) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            trial: Trial = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(setting.run(trial))
        except ConfigError as error:
            pipe.send(error)
        except Exception:  # not every exception can be sent, and no traceback can
            pipe.send(RuntimeError(traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
