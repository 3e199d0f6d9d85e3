"""Makes the threads of a node that may touch its device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch


def _nothing() -> None:
    """A CPU needs no preparation."""


@dataclass(frozen=True)
class DeviceThreads:
    """Every thread that it makes calls `enter` first, and so does the thread that loads the model and schedules.

    CUDA has a current device for each thread, at first device 0. A thread of a node with `--device cuda:1` that does
    not enter would launch kernels on the wrong GPU, and take memory there.
    """

    enter: Callable[[], None] = _nothing

    @classmethod
    def of(cls, device: torch.device) -> DeviceThreads:
        """Threads whose current device is `device`."""
        return cls(partial(torch.cuda.set_device, device)) if device.type == "cuda" else cls()

    def start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread that runs `run`."""

        def entered() -> None:
            self.enter()
            run()

        thread = threading.Thread(target=entered, name=name, daemon=True)
        thread.start()
        return thread

    def executor(self, name: str, then: Callable[[], None] = _nothing) -> ThreadPoolExecutor:
        """An executor of one thread, which the first call starts. The thread calls `then` once it has entered."""

        def entered() -> None:
            self.enter()
            then()

        return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=entered)
