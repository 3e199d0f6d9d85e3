"""Traces of a node on demand: what each thread and the device did, with the parts of a step as named spans."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from shared import log
from shared.errors import RequestError
from shared.protocol.messages import StartProfile, StopProfile

Span = Callable[[str], AbstractContextManager[object]]
"""Names what runs inside it in a trace, when there is one."""


class Profiler:
    """Starts and stops torch's profiler, on the scheduler thread; `span` is for any thread.

    torch has one profiler for the whole process, so a process has one Profiler.

    A trace holds every step in memory until it is written, so a trace without `num_steps` grows until it is
    stopped. Writing it takes about as long as a few hundred steps, and nothing else runs meanwhile.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._folder = Path(folder)
        self._name = name
        self._profile: Any = None
        self._steps_left: int | None = None
        self._traces = 0
        self._written: str | None = None
        """The last trace that ended by itself, until it is asked for."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Names what runs inside it in a trace; costs next to nothing while there is none."""
        return nullcontext() if self._profile is None else torch.profiler.record_function(name)

    def start(self, *, num_steps: int | None, with_stack: bool, record_shapes: bool) -> str:
        """Begin; returns where the trace will be. Raises RequestError when one is running, or cannot be written."""
        if self._profile is not None:
            raise RequestError("a profile is running already; stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"--profile-dir {self._folder}: {error.strerror}") from None
        if not os.access(self._folder, os.W_OK):
            raise RequestError(f"--profile-dir {self._folder}: not writable")
        self._written = None
        self._traces += 1
        self._steps_left = num_steps
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            with_stack=with_stack,
            record_shapes=record_shapes,
            acc_events=True,  # without it torch 2.11 warns that a later cycle would clear events; there is one cycle
            # The forwards of a CPU node run on a thread of their own.
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()
        return str(self._path())

    def obey(self, message: StartProfile | StopProfile) -> tuple[bool, str]:
        """Carry out a router's call: whether it could be done, and where the trace is or why not."""
        try:
            match message:
                case StartProfile():
                    return True, self.start(
                        num_steps=message.num_steps,
                        with_stack=message.with_stack,
                        record_shapes=message.record_shapes,
                    )
                case StopProfile():
                    return True, self.stop()
        except RequestError as error:
            return False, error.message

    def step_done(self, worked: bool) -> None:
        """Count a turn of the loop. The last of `num_steps` turns that did something ends the trace."""
        if self._profile is None or self._steps_left is None or not worked:
            return
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._stop_by_itself()

    def stop(self) -> str:
        """Write the trace, in Chrome's format; returns where it is.

        One that has ended by itself, after `num_steps`, is told once. Raises RequestError when there is none, or
        when it cannot be written.
        """
        if self._profile is None:
            written, self._written = self._written, None
            if written is None:
                raise RequestError("no profile is running")
            return written
        profile, self._profile = self._profile, None
        path = self._path()
        try:
            profile.stop()
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise RequestError(f"{path}: the trace cannot be written: {error}") from error
        return str(path)

    def close(self) -> None:
        """Write what is running."""
        if self._profile is not None:
            self._stop_by_itself()

    def _stop_by_itself(self) -> None:
        try:
            self._written = self.stop()
        except RequestError as error:
            log.warn("profile_lost", reason=error.message)

    def _path(self) -> Path:
        return (
            self._folder
            / f"{self._name}-{time.strftime('%Y%m%d')}-{os.getpid()}-{self._traces}.trace.json.gz"
        )
