"""Makes the threads of a node that may touch its device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch


def _nothing() -> None:
    """A CPU has no current device, and no streams."""


@dataclass(frozen=True)
class DeviceThreads:
    """Every thread that it makes calls `enter` first. The thread that loads the model and schedules calls it too.

    CUDA has a current device for each thread, at first device 0. A thread of a node with `--device cuda:1` that did
    not enter would launch kernels on the wrong GPU, and take memory there.
    """

    enter: Callable[[], None] = _nothing
    use_own_stream: Callable[[], None] = _nothing

    @classmethod
    def of(cls, device: torch.device) -> DeviceThreads:
        """Threads whose current device is `device`. A GPU has its index."""
        if device.type != "cuda":
            return cls()
        assert device.index is not None, "torch makes no current device of a GPU without its index"
        return cls(partial(torch.cuda.set_device, device), partial(_use_own_stream, device))

    def start(self, name: str, run: Callable[[], object], *, own_stream: bool = False) -> threading.Thread:
        """Start a daemon thread that runs `run`, on a stream of its own or on the default stream."""

        def entered() -> None:
            self._enter(own_stream)
            run()

        thread = threading.Thread(target=entered, name=name, daemon=True)
        thread.start()
        return thread

    def executor(self, name: str, *, own_stream: bool = False) -> ThreadPoolExecutor:
        """An executor with one thread, which the first call starts."""
        return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._enter, initargs=(own_stream,))

    def _enter(self, own_stream: bool) -> None:
        self.enter()
        if own_stream:
            self.use_own_stream()


def _use_own_stream(device: torch.device) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
