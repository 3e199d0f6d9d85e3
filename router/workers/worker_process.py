"""One worker, as its parent sees it: a child process and the bus to it, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from router.bus.worker_bus import BusEnd
from router.bus.worker_messages import (
    Answer,
    Answered,
    Ask,
    Asked,
    CannotStart,
    Check,
    Checked,
    Loaded,
    MemberAdded,
    MemberRemoved,
    NotDone,
    Question,
    Ready,
    ToParent,
    ToWorker,
)
from router.nodes.liveness import Liveness
from shared.errors import LinkError
from shared.log import event, warn
from shared.protocol.messages import Load

BOOT_TIMEOUT_S = 300.0
"""For loading the tokenizer, which may have to be fetched."""
ANSWER_TIMEOUT_S = 30.0
CHECK_S = 1.0

_STDERR = 2

OnMessage = Callable[["WorkerProcess", Loaded | Ready | Ask | MemberAdded | MemberRemoved], None]


class WorkerProcess:
    """`spawn` it, then `run` until it has ended. `last_words` is why it could not start, as it says itself."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, bus: BusEnd[ToParent]) -> None:
        self.name = name
        self.process = process
        self.last_words: str | None = None
        self._bus = bus
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._liveness = _liveness(BOOT_TIMEOUT_S)

    @classmethod
    async def spawn(cls, name: str, flags: Sequence[str]) -> WorkerProcess:
        """Start a worker with the flags of its parent. It ends when its standard input does, as local nodes do."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as held:
            held.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "router.workers.worker",
                str(theirs.fileno()),
                name,
                *flags,
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.PIPE,
                stdout=_STDERR,
                start_new_session=True,
            )
            held.pop_all()
        event("worker_started", worker=name, pid=process.pid)
        return cls(name, process, await BusEnd.open(ours, ToParent))

    @property
    def epitaph(self) -> str:
        """How it ended."""
        code = self.process.returncode
        if code is None:
            return "still running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def send(self, message: ToWorker) -> None:
        """Tell it something. One that does not read is killed."""
        try:
            self._bus.send(message)
        except LinkError as e:
            self.kill(str(e))

    async def ask(self, question: Question) -> Answer:
        """Its answer, however long that takes; NotDone when it ends before."""
        call_id = next(self._calls)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answered
        self.send(Asked(call_id, question))
        try:
            return await answered
        finally:
            del self._waiting[call_id]

    async def run(self, on_message: OnMessage) -> None:
        """Pass on what it says until it has ended, which it is made to do when it hangs."""
        checking = asyncio.create_task(self._check())
        try:
            while True:
                self._handle(await self._bus.receive(), on_message)
        except LinkError:
            await self.process.wait()
        finally:
            checking.cancel()
            await asyncio.gather(checking, self._bus.close(), return_exceptions=True)
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_result(NotDone(f"the worker {self.epitaph}"))

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process.returncode is None:
            try:
                os.kill(self.process.pid, signum)
            except ProcessLookupError:
                return  # it has just ended

    def kill(self, reason: str) -> None:
        """Do not wait for it."""
        if self.process.returncode is None:
            warn("worker_killed", worker=self.name, reason=reason)
            self.signal(signal.SIGKILL)

    def _handle(self, message: ToParent, on_message: OnMessage) -> None:
        match message:
            case Checked():
                self._liveness.pong(time.monotonic(), Load())
            case Answered(call_id, answer):
                waiting = self._waiting.get(call_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            case CannotStart(reason):
                self.last_words = reason
            case _:
                if isinstance(message, Loaded):
                    self._liveness = _liveness(ANSWER_TIMEOUT_S)
                on_message(self, message)

    async def _check(self) -> None:
        while True:
            self.send(Check())
            await asyncio.sleep(CHECK_S)
            verdict = self._liveness.tick(time.monotonic())
            if verdict is not None:
                self.kill(verdict)
                return


def _liveness(timeout_s: float) -> Liveness:
    return Liveness(time.monotonic(), timeout_s=timeout_s, interval_s=CHECK_S)
