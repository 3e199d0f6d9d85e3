"""A child process that is started again whenever it ends.

    start ──▶ loaded ──▶ ready ──▶ ended ──0.5, 1, 2, .. 30 s──▶ start ...        until `stop`
      │         └──▶ gave up before it was ever ready: ChildFailed, since it has said why it cannot serve
      └──▶ ended before it had ever loaded: ChildFailed, since trying again would not help

A child must not outlive its supervisor: its standard input is one end of a socket pair, whose other end the kernel
closes however the supervisor dies. A child has a session of its own, so that Ctrl-C in a terminal reaches the
supervisor alone, which stops its children in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from shared.log import event
from shared.protocol.heartbeat import Heartbeat

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Pauses before a child is started again. They double, until one has lived for longer than the longest of them."""
BOOT_TIMEOUT_S = 300.0
"""For a child with a heartbeat to load, which may include a download."""
HEARTBEAT_S = 1.0

GAVE_UP = frozenset({2, 3})
"""Exit codes of a child that has said why it cannot serve: a wrong flag or model, and a failed first generation."""

LOADED, READY, HEARTBEAT = b"L", b"R", b"."
"""What a child with a heartbeat writes to its standard input's socket."""

_STDERR = 2


class ChildFailed(Exception):
    """A child ended before it was ever ready. `code` is negative for a signal, None if no process was started."""

    def __init__(self, kind: str, name: str, code: int | None, how: str) -> None:
        super().__init__(f"{kind} {name} {how} before it was ready")
        self.kind, self.name, self.code = kind, name, code


class ChildProcess:
    """Runs `python ARGV`, and starts it again whenever it ends. A child sets `loaded` and `ready` by a message.

    With a `heartbeat_timeout_s`, a child whose event loop hangs for so long is killed. `on_start` is called when a
    process has been started, `on_exit(code, reason, pause_s)` when one has ended, or could not be started, and the
    next will be started after that pause. Without an exit code none was started.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        argv: Callable[[], Sequence[str]],
        *,
        heartbeat_timeout_s: float | None = None,
        stdout: int | None = _STDERR,
        pauses_s: tuple[float, float] = (MIN_PAUSE_S, MAX_PAUSE_S),
        on_start: Callable[[], None] = lambda: None,
        on_exit: Callable[[int | None, str, float], None] = lambda code, reason, pause_s: None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.loaded = asyncio.Event()
        self.ready = asyncio.Event()
        self._argv = argv
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stdout = stdout
        self._pauses_s = pauses_s
        self._on_start = on_start
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the child, and keep it running in the task `keeper`, which raises ChildFailed."""
        self.keeper = asyncio.create_task(self._keep_alive(), name=f"keep {self.kind} {self.name}")

    def send(self, frame: bytes) -> None:
        """Write to the child's standard input. A frame for a child that has just ended is lost."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    def stop(self) -> None:
        """Send SIGTERM, and do not start the child again."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self, reason: str) -> None:
        """Send SIGKILL, and do not start the child again."""
        self._stopping.set()
        self._kill(reason)

    async def _keep_alive(self) -> None:
        shortest_s, longest_s = self._pauses_s
        pause_s = shortest_s
        while not self._stopping.is_set():
            began = time.monotonic()
            code, how = await self._run_once()
            if self._stopping.is_set():
                self._log("exited", code=code)
                return
            if not self.ready.is_set() and (not self.loaded.is_set() or code in GAVE_UP):
                raise ChildFailed(self.kind, self.name, code, how)
            if time.monotonic() - began > longest_s:
                pause_s = shortest_s
            level = logging.WARNING if code else logging.INFO
            self._log("exited", level=level, code=code, restart_in_s=pause_s)
            self._on_exit(code, how, pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, longest_s)

    async def _run_once(self) -> tuple[int | None, str]:
        """Start a process and wait for its end: the exit code, None if the system refused to start it, and words."""
        async with contextlib.AsyncExitStack() as exits:
            try:
                process, reader = await self._start_process(exits)
            except OSError as e:  # too many processes or open files, or no memory
                self._log("not_started", level=logging.WARNING, reason=e.strerror)
                return None, f"could not be started: {e.strerror}"
            watching = asyncio.create_task(self._watch(reader), name=f"watch {self.kind} {self.name}")
            try:
                code = await process.wait()
                await asyncio.wait({watching}, timeout=HEARTBEAT_S)  # what it has said last
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        return code, how_it_ended(code)

    async def _start_process(
        self, exits: contextlib.AsyncExitStack
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        """A process, and what it says; `exits` closes the socket to it. Raises OSError."""
        ours, theirs = socket.socketpair()
        exits.enter_context(ours)
        with theirs:
            ours.setblocking(False)
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            exits.push_async_callback(_close, self._writer)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._argv(),
                stdin=theirs.fileno(),
                stdout=self._stdout,
                start_new_session=True,
            )
        self._log("started", pid=self._process.pid)
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)  # the signal to all children came too early for this one
        self._on_start()
        return self._process, reader

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Read the child's messages, and kill a child whose heartbeat stops."""
        heartbeat = _heartbeat(BOOT_TIMEOUT_S)
        heard = asyncio.create_task(reader.read(256))
        try:
            while True:
                await asyncio.wait({heard}, timeout=HEARTBEAT_S)
                now = time.monotonic()
                if heard.done():
                    said = heard.result()
                    if not said:
                        return
                    if LOADED in said:
                        self.loaded.set()
                        heartbeat = _heartbeat(self._heartbeat_timeout_s or BOOT_TIMEOUT_S)
                    if READY in said:
                        self.ready.set()
                        self._log("is_ready")
                    heartbeat.heard(now)
                    heard = asyncio.create_task(reader.read(256))
                if self._heartbeat_timeout_s and heartbeat.silent(now):
                    self._kill(f"no heartbeat for {heartbeat.silence(now):.1f} s")
                    return
                heartbeat.ping_due(now)  # nothing is sent: a child beats by itself
        finally:
            heard.cancel()

    def _kill(self, reason: str) -> None:
        if self._process is not None and self._process.returncode is None:
            self._log("killed", level=logging.WARNING, reason=reason)
            self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signum)

    def _log(self, what: str, *, level: int = logging.INFO, **fields: object) -> None:
        event(f"{self.kind}_{what}", level=level, **{self.kind: self.name, **fields})


async def stop_all(children: Sequence[ChildProcess], grace_s: float) -> None:
    """SIGTERM for all, SIGKILL for those that have not ended after `grace_s`."""
    for child in children:
        child.stop()
    keepers = {child.keeper: child for child in children if child.keeper is not None}
    if not keepers:
        return
    _, late = await asyncio.wait(keepers, timeout=grace_s)
    for keeper in late:
        keepers[keeper].kill(f"not stopped within {grace_s:g} s")
    await asyncio.gather(*keepers, return_exceptions=True)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _heartbeat(timeout_s: float) -> Heartbeat:
    return Heartbeat(HEARTBEAT_S, timeout_s, time.monotonic())
