"""Engines as processes that answer prompts: peers by their runners, Baton by its router and nodes."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil

from tests.processes import HOST, Router

LOG_TAIL_CHARS = 1500


class EngineError(Exception):
    """An engine did not start, or ended; the message holds the first error of its log, and the end of it."""


@dataclass(frozen=True)
class Answers:
    """Of some prompts, in their order. Times in seconds from when they were sent."""

    seconds: float
    first_token_s: Sequence[float]
    end_s: Sequence[float]
    output_ids: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Memory:
    """Of all processes of an engine, in bytes. `peak` counts what two share twice; `proportional` does not."""

    peak: int
    proportional: int


class Engine(Protocol):
    """Loaded once, asked many times."""

    name: str
    version: str
    """Known once it is loaded."""

    def __enter__(self) -> Engine:
        """Load the model. Raises EngineError."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all its processes."""

    def ask(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Answers:
        """Greedy outputs of exactly so many tokens. Raises EngineError."""

    def pause(self) -> None:
        """Take no CPU time until the next `ask`."""

    def memory(self) -> Memory:
        """So far."""


class PeerEngine:
    """A runner (see runners/lines.py) and its children, on the cores that this process may use."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.version = ""
        self._command = command
        self._environment = environment
        self._log_path = log
        self._family: list[psutil.Process] = []

    def __enter__(self) -> PeerEngine:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self.version = self._read()["ready"]
        except BaseException:  # also when the bench is interrupted: `__exit__` is for what has been entered
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._family_now():
            _send(process, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def ask(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Answers:
        for process in self._family_now():
            _send(process, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens}) + "\n")
        self._process.stdin.flush()
        return checked(Answers(**self._read()), len(prompts), max_new_tokens)

    def pause(self) -> None:
        """Idle engines would spin, or wake up."""
        for process in self._family_now():
            _send(process, signal.SIGSTOP)

    def memory(self) -> Memory:
        return memory_of(self._family_now())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = self._log_path.read_text(errors="replace")
            first = re.search(r"\w*Error: .*", log)
            raise EngineError(f"{self.name} ended: {first[0] if first else ''}\n{log[-LOG_TAIL_CHARS:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _family_now(self) -> list[psutil.Process]:
        """It and its children; the last known ones after its end, so that none is left."""
        if self._process.poll() is None:
            me = psutil.Process(self._process.pid)
            self._family = [me, *me.children(recursive=True)]
        return self._family


class BatonEngine:
    """`router --local` with its nodes, asked over HTTP as users do: one request at once, or all in one batch."""

    def __init__(self, local: str, model: Path, kv_tokens: int, folder: Path) -> None:
        self.name = f"baton-{local}"
        self.version = version("baton-serve")
        flags = ("--local", local, "--model", str(model), "--dtype", "bfloat16", "--device", "cpu")
        self._router = Router(folder, *flags, "--max-total-tokens", str(kv_tokens), name=self.name)

    def __enter__(self) -> BatonEngine:
        try:
            self._router.start()
            self._router.wait_ready()
        except AssertionError as error:
            self._router.close()
            raise EngineError(str(error)) from error
        except BaseException:  # the bench is interrupted
            self._router.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._router.close()

    def ask(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Answers:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        answers = self._stream if len(prompts) == 1 else self._batch
        return checked(answers(prompts, sampling), len(prompts), max_new_tokens)

    def pause(self) -> None:
        """Its processes sleep; stopped nodes would be lost nodes."""

    def memory(self) -> Memory:
        return memory_of(self._router.family())

    def _stream(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Answers:
        """One prompt. Times are those of its events at this client."""
        body = {"input_ids": list(prompts[0]), "sampling_params": sampling, "stream": True}
        times, events = [], []
        with _Post(self._router.port, body) as post:
            for line in post.response:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter() - post.sent_at)
                    events.append(line)
        output_ids = json.loads(events[-1][6:])["output_ids"]
        return Answers(times[-1], times[:1], times[-1:], [output_ids])

    def _batch(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Answers:
        """All prompts in one request. First tokens by the stamps of the nodes, on the clock of this machine."""
        body = {"input_ids": prompts, "sampling_params": sampling, "return_timeline": True}
        with _Post(self._router.port, body) as post:
            outputs = json.loads(post.response.read())
            seconds = time.perf_counter() - post.sent_at
        metas = [output["meta_info"] for output in outputs]
        first_token_s = [first_token_at(meta["timeline"]) - post.sent_time for meta in metas]
        end_s = [meta["e2e_latency"] for meta in metas]
        return Answers(seconds, first_token_s, end_s, [output["output_ids"] for output in outputs])


class _Post:
    """One POST /generate on a connection of its own."""

    def __init__(self, port: int, body: Mapping[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=600)
        self._body = json.dumps(body).encode()

    def __enter__(self) -> _Post:
        self._connection.connect()
        self.sent_at, self.sent_time = time.perf_counter(), time.time()
        self._connection.request("POST", "/generate", self._body, {"Content-Type": "application/json"})
        self.response = self._connection.getresponse()
        if self.response.status != 200:
            raise EngineError(f"baton answered {self.response.status}: {self.response.read().decode()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


def checked(answers: Answers, num_prompts: int, max_new_tokens: int) -> Answers:
    """The answers, if they are whole. Raises EngineError."""
    lengths = [len(ids) for ids in answers.output_ids]
    if lengths != [max_new_tokens] * num_prompts:
        raise EngineError(
            f"{max_new_tokens} tokens for each of {num_prompts} prompts were asked, not {lengths}"
        )
    return answers


def memory_of(processes: Sequence[psutil.Process]) -> Memory:
    """Of those that still run."""
    peak = proportional = 0
    for process in processes:
        folder = Path("/proc", str(process.pid))
        try:
            peak += _kib((folder / "status").read_text(), "VmHWM:") << 10
            proportional += _kib((folder / "smaps_rollup").read_text(), "Pss:") << 10
        except (OSError, psutil.NoSuchProcess):
            continue
    return Memory(peak, proportional)


def _kib(text: str, field: str) -> int:
    """Of a line `field   123 kB`; 0 where there is none, as of a process that has just ended."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(field)), 0)


def first_token_at(timeline: Sequence[Mapping[str, Any]]) -> float:
    """When the node that prefilled has the first token: it hands the request over, decodes on, or is done."""
    after = ("transferring", "decoding", "finished")
    prefilled = [stamp for stamp in timeline if stamp["stage"] == "prefilling"]
    role = prefilled[0]["role"]
    return min(float(s["time"]) for s in timeline if s["role"] == role and s["stage"] in after)


def _send(process: psutil.Process, signum: signal.Signals) -> None:
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return
