"""How long a node takes to start, and what requests and tokens cost a router: real processes, in front of one node.

CPU time is that of the router's serving process, so it is the same on a machine that is a little busy, and does not
depend on how fast the node is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from planner.measure.fitting import Rounds, nonnegative, residual
from planner.measure.forwards import OnProgress
from planner.measure.machine import MachineWatch, process_cpu_s, read_cpu_times
from planner.profile import Residual, RouterCost
from shared.errors import ConfigError
from shared.protocol.messages import NodeLimits

START_TIMEOUT_S = 1800.0
"""A large model takes minutes to load."""
_STOP_TIMEOUT_S = 30.0
_SERVING_PROCESS = "router.processes.router_process"
_ROUTER = (
    "import os, signal, sys, threading; from router.__main__ import main; "
    "end = lambda: os.read(0, 1) or os.kill(os.getpid(), signal.SIGTERM); "
    "threading.Thread(target=end, daemon=True).start(); sys.exit(main(sys.argv[1:]))"
)
"""A router that ends when its standard input closes."""
_FEW_IDS = 200
"""Token ids that every vocabulary has."""
_TAIL_BYTES = 1 << 16
_WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that run at once. `num_words` is of each prompt, `num_tokens` of each output."""

    num_requests: int
    num_words: int
    num_tokens: int
    rounds: int = 1
    has_text: bool = True
    """False for a model without a tokenizer: each word is a token id."""

    @property
    def name(self) -> str:
        """As the terminal shows it."""
        return f"{self.num_requests} requests of {self.num_words} words in and {self.num_tokens} tokens out"


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a router did under a load."""

    what: str
    requests: int
    prompt_tokens: int
    tokens: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class RouterMeasured:
    """What was measured of a router."""

    cost: RouterCost
    residuals: tuple[Residual, ...] = ()
    remarks: tuple[str, ...] = ()


def fit_router(used: Sequence[Used]) -> RouterMeasured:
    """What a request, a token of output and a token of a prompt cost, beside what a router does when it is idle."""
    rows = [(one.requests, one.tokens, one.prompt_tokens, one.wall_s) for one in used]
    costs = nonnegative(rows, [one.cpu_s for one in used])
    seconds, fitted = defaultdict(list), defaultdict(list)
    for one, row in zip(used, rows, strict=True):
        seconds[one.what].append(one.cpu_s)
        fitted[one.what].append(sum(cost * number for cost, number in zip(costs, row, strict=True)))
    points = [Rounds(what=what, seconds=tuple(rounds)) for what, rounds in seconds.items()]
    return RouterMeasured(
        cost=RouterCost(request_s=costs[0], token_s=costs[1], prompt_token_s=costs[2]),
        residuals=tuple(residual(point, statistics.median(fitted[point.what])) for point in points),
    )


def start_node(argv: Sequence[str]) -> tuple[Process, str, float]:
    """A decode node: the process, its address, and the seconds until it was ready. Raises ConfigError."""
    begin = time.monotonic()
    own = ("--port", "0", "--log-level", "info", "--exit-with-parent")
    node = Process([sys.executable, "-u", "-m", "decode_node", *argv, *own])
    address = _said(node, r" listening .*address=tcp://(\S+)")
    return node, address, time.monotonic() - begin


def start_router(address: str, model: str, argv: Sequence[str] = ()) -> tuple[Process, str]:
    """A router that has joined the node at `address`: the process, and its URL. Raises ConfigError."""
    own = ["--decode", address, "--model", model, "--port", "0", "--control-port", "0"]
    router = Process([sys.executable, "-u", "-c", _ROUTER, *own, *argv])
    return router, _said(router, r"Serving .* at (http\S+?):? ").rstrip(":")


def _said(process: Process, pattern: str) -> str:
    """What it says when it is ready. A process that does not say it is ended."""
    try:
        return process.wait_for(pattern)[1]
    except BaseException:
        process.close()
        raise


def measure_router(
    node: Process,
    address: str,
    model: str,
    loads: Sequence[Load],
    router_argv: Sequence[str] = (),
    *,
    on_progress: OnProgress = lambda what, fraction: None,
) -> RouterMeasured:
    """A router in front of `node` at `address`, under each load and without one. Raises ConfigError."""
    on_progress("a router starts", 0.0)
    router, url = start_router(address, model, router_argv)
    with contextlib.closing(router):
        pid = serving_pid(router.pid)
        asyncio.run(_run(url, pid, replace(loads[0], num_requests=4), seed=0))  # imports, caches
        watch = MachineWatch(partial(read_cpu_times, [node.pid, router.pid, pid]))
        used = []
        jobs = [load for load in loads for _ in range(load.rounds)]
        for index, load in enumerate(jobs):
            on_progress(f"router under {load.name}", index / len(jobs))
            used.append(asyncio.run(_run(url, pid, load, seed=1 + index)))
        on_progress("router without requests", 1.0)
        begin, cpu_s = time.monotonic(), process_cpu_s(pid)
        time.sleep(1.0)
        idle = Used(
            what="router without requests",
            requests=0,
            prompt_tokens=0,
            tokens=0,
            wall_s=time.monotonic() - begin,
            cpu_s=max(process_cpu_s(pid) - cpu_s, 1e-6),
        )
        remarks = tuple(watch.remarks("the router"))
    return replace(fit_router([*used, idle]), remarks=remarks)


def serving_pid(supervisor: int) -> int:
    """Of the one router that a supervisor has started."""
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        if _SERVING_PROCESS in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise ConfigError("the router that was started has no process that serves")


async def _run(url: str, pid: int, load: Load, seed: int) -> Used:
    random = np.random.default_rng(seed)
    bodies = [_body(load, random) for _ in range(load.num_requests)]
    begin, cpu_s = time.monotonic(), process_cpu_s(pid)
    usages = await asyncio.gather(*(_stream(url, *body) for body in bodies))
    cpu_s = process_cpu_s(pid) - cpu_s
    return Used(
        what=f"router, {load.name}",
        requests=len(usages),
        prompt_tokens=sum(prompt for prompt, _ in usages),
        tokens=sum(output for _, output in usages),
        wall_s=time.monotonic() - begin,
        cpu_s=cpu_s,
    )


def _body(load: Load, random: np.random.Generator) -> tuple[str, bytes]:
    """The path and the body of one request."""
    if not load.has_text:
        sampling = {"max_new_tokens": load.num_tokens, "ignore_eos": True, "temperature": 0}
        ids = random.integers(1, _FEW_IDS, load.num_words).tolist()
        return "/generate", json.dumps(
            {"input_ids": ids, "sampling_params": sampling, "stream": True}
        ).encode()
    body = {
        "prompt": " ".join(random.choice(_WORDS, load.num_words)),
        "max_tokens": load.num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return "/v1/completions", json.dumps(body).encode()


async def _stream(url: str, path: str, body: bytes) -> tuple[int, int]:
    """One request, on a connection of its own: tokens of its prompt and of its output, as the router counts them."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )
    tail = b""
    while part := await reader.read(1 << 16):
        tail = (tail + part)[-_TAIL_BYTES:]
    writer.close()
    counts = re.findall(rb'"prompt_tokens":(\d+),"completion_tokens":(\d+)', tail)
    if b"data: [DONE]" not in tail or not counts:
        said = tail[-300:].decode(errors="replace")
        raise ConfigError(f"the router that was started has cut a stream off: {said}")
    prompt, output = counts[-1]
    return int(prompt), int(output)


class Process:
    """A child whose output is read by a thread, so that it is never stopped by a full pipe.

    Its standard input closes when this process ends, however that ends.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._popen.pid

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """Wait for a line that has `pattern`. Raises ConfigError with the last lines when the process ends before."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while time.monotonic() < deadline:
                for line in self._lines:
                    if found := re.search(pattern, line):
                        return found
                if not self._reader.is_alive():
                    break
                self._news.wait(0.1)
        last = "".join(self._lines[-5:]).strip()
        raise ConfigError(f"{' '.join(self._argv[1:])} did not start: {last or 'it said nothing'}")

    def close(self) -> None:
        """Ask it to end, and end it if it does not."""
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._reader.join()
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()


def loads_for(
    decode_token_s: float, prompt_token_s: float, limits: NodeLimits, *, has_text: bool, seconds: float
) -> tuple[Load, ...]:
    """Loads of requests, of tokens and of prompts, each of which a node with these costs serves in so many seconds.

    The costs are seconds of a decode step of 32 requests, and of a token of a prompt.
    """
    streams, context_length = min(32, limits.max_running_requests), limits.context_length
    short, long = min(32, context_length // 4), min(1024, context_length // 2)
    tokens = int(min(max(seconds / decode_token_s, 8), 192, context_length // 2))
    prompts = int(min(max(seconds / (prompt_token_s * long), 2), 16, limits.max_running_requests))
    return (
        Load(num_requests=streams, num_words=short, num_tokens=2, rounds=3, has_text=has_text),
        Load(num_requests=streams, num_words=short, num_tokens=tokens, rounds=2, has_text=has_text),
        Load(num_requests=prompts, num_words=long, num_tokens=2, rounds=2, has_text=has_text),
    )
