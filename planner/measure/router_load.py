"""How long a node takes to start, and what requests and tokens cost a router: real processes, in front of one node.

CPU time is that of the router's serving process, so it is the same on a machine that is a little busy, and does not
depend on how fast the node is.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from planner.measure.fitting import Point, fit
from planner.measure.forwards import OnProgress
from planner.measure.machine import MachineWatch, others_cpu_s, process_cpu_s
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

    def body(self, random: np.random.Generator) -> tuple[str, bytes]:
        """The path and the body of one request."""
        if not self.has_text:
            sampling = {"max_new_tokens": self.num_tokens, "ignore_eos": True, "temperature": 0}
            ids = random.integers(1, _FEW_IDS, self.num_words).tolist()
            asked = {"input_ids": ids, "sampling_params": sampling, "stream": True}
            return "/generate", json.dumps(asked).encode()
        body = {
            "prompt": " ".join(random.choice(_WORDS, self.num_words)),
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return "/v1/completions", json.dumps(body).encode()


def fit_router(points: Sequence[Point]) -> tuple[RouterCost, tuple[Residual, ...]]:
    """What a request, a token of output and a token of a prompt cost, beside what a router does when it is idle.

    The row of a point has so many of each, and the seconds that it took.
    """
    costs = fit(points)
    router = RouterCost(request_s=costs[0], token_s=costs[1], prompt_token_s=costs[2])
    return router, tuple(point.residual(costs) for point in points)


def start_node(argv: Sequence[str]) -> tuple[Process, str, float]:
    """A decode node: the process, its address, and the seconds until it was ready. Raises ConfigError."""
    begin = time.monotonic()
    own = ("--port", "0", "--log-level", "info", "--exit-with-parent")
    node = Process([sys.executable, "-u", "-m", "decode_node", *argv, *own])
    address = node.wait_for(r" listening .*address=tcp://(\S+)")
    return node, address, time.monotonic() - begin


def start_router(address: str, model: str, argv: Sequence[str] = ()) -> tuple[Process, str]:
    """A router that has joined the node at `address`: the process, and its URL. Raises ConfigError."""
    own = ["--decode", address, "--model", model, "--port", "0", "--control-port", "0"]
    router = Process([sys.executable, "-u", "-c", _ROUTER, *own, *argv])
    return router, router.wait_for(r"Serving .* at (http\S+?):? ").rstrip(":")


def measure_router(
    node: Process,
    address: str,
    model: str,
    loads: Sequence[Load],
    router_argv: Sequence[str],
    on_progress: OnProgress,
) -> tuple[list[Point], list[str]]:
    """A router in front of `node` at `address`, under each load and without one, and remarks. Raises ConfigError."""
    on_progress("a router starts")
    router, url = start_router(address, model, router_argv)
    with contextlib.closing(router):
        pid = serving_pid(router.pid)
        _run(url, pid, replace(loads[0], num_requests=4), seed=0)  # imports, caches
        watch = MachineWatch(partial(others_cpu_s, [node.pid, router.pid, pid]))
        points = []
        for load in loads:
            for seed in range(load.rounds):
                on_progress(f"router under {load.name}")
                points.append(_run(url, pid, load, seed=1 + seed))
        on_progress("router without requests")
        begin, cpu_s = time.monotonic(), process_cpu_s(pid)
        time.sleep(1.0)
        idle_s = max(process_cpu_s(pid) - cpu_s, 1e-6)
        row = (0, 0, 0, time.monotonic() - begin)
        points.append(Point(what="router without requests", row=row, seconds=(idle_s,)))
        return points, [*watch.remarks("the router")]


def serving_pid(supervisor: int) -> int:
    """Of the one router that a supervisor has started."""
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        if _SERVING_PROCESS in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise ConfigError("the router that was started has no process that serves")


def _run(url: str, pid: int, load: Load, seed: int) -> Point:
    random = np.random.default_rng(seed)
    bodies = [load.body(random) for _ in range(load.num_requests)]
    begin, cpu_s = time.monotonic(), process_cpu_s(pid)
    with ThreadPoolExecutor(load.num_requests) as clients:
        usages = list(clients.map(lambda body: _stream(url, *body), bodies))
    cpu_s = process_cpu_s(pid) - cpu_s
    prompt_tokens, tokens = map(sum, zip(*usages, strict=True))
    row = (len(usages), tokens, prompt_tokens, time.monotonic() - begin)
    return Point(what=f"router, {load.name}", row=row, seconds=(cpu_s,))


def _stream(url: str, path: str, body: bytes) -> tuple[int, int]:
    """One request: tokens of its prompt and of its output, as the router counts them."""
    connection = HTTPConnection(urlsplit(url).netloc)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse().read()
    counts = re.findall(rb'"prompt_tokens":(\d+),"completion_tokens":(\d+)', answer)
    if b"data: [DONE]" not in answer or not counts:
        said = answer[-300:].decode(errors="replace")
        raise ConfigError(f"the router that was started has cut a stream off: {said}")
    prompt, output = counts[-1]
    return int(prompt), int(output)


class Process:
    """A child whose output is a file. Its standard input closes when this process ends, however that ends."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._said = tempfile.NamedTemporaryFile()  # noqa: SIM115  # `close` closes it
        self._popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=self._said, stderr=subprocess.STDOUT
        )

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._popen.pid

    def wait_for(self, pattern: str) -> str:
        """The first group of `pattern` in what it says. Raises ConfigError when it ends before; then it is closed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        has_ended = False
        try:
            while time.monotonic() < deadline and not has_ended:
                has_ended = self._popen.poll() is not None
                said = Path(self._said.name).read_text(errors="replace")
                if found := re.search(pattern, said):
                    return found[1]
                time.sleep(0.02)
            last = "".join(said.splitlines(keepends=True)[-5:]).strip()
            raise ConfigError(f"{' '.join(self._argv[1:])} did not start: {last or 'it said nothing'}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ask it to end, and end it if it does not."""
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._said.close()


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
