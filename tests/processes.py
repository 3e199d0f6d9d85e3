"""Nodes and routers as real processes, started as an operator does: known ports, known pids, logs in files.

A `Fleet` is nodes started by hand and a router that joins them, so that each process can be killed, stopped,
continued and restarted at its address. A `Router` alone runs `router` with any flags. A `Call` is one HTTP request on
a connection of its own, read by a thread, so that a test can look at it while it streams, or hang up.

Everything that was started is killed when its `with` block ends, however it ends, and its log is printed when that is
by an exception.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil
import pytest

from tests.forked import Forked, run_module
from tests.patience import PATIENCE_S, until

HOST = "127.0.0.1"
NO_TIMEOUT_S = str(2 * PATIENCE_S)
"""Where a test does not say otherwise, no process counts as dead for being slow."""
NODE_FLAGS = (
    *("--dtype", "float32", "--device", "cpu", "--cpu-cores", "any:1", "--max-total-tokens", "16384"),
    *("--peer-timeout-s", NO_TIMEOUT_S, "--router-timeout-s", NO_TIMEOUT_S),
)
LOG_TAIL_CHARS = 6000


_candidates = itertools.count(os.getpid() * 131)


def free_port() -> int:
    """A port that nobody has, below those that the kernel takes for outgoing connections: it can be used again.

    None is given twice, and test runs beside each other look for theirs in different places.
    """
    for candidate in _candidates:
        port = 18000 + candidate % 14000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise AssertionError("no free port")


def assert_gone(processes: Iterable[psutil.Process]) -> None:
    """Wait until none of these processes runs any more."""
    _, alive = psutil.wait_procs(list(processes), timeout=PATIENCE_S)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"orphans: {[(p.pid, p.cmdline()) for p in alive]}"


class Child(Protocol):
    """A child of this process: the part of subprocess.Popen that is used here."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def wait(self, timeout: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        ...


class Process:
    """One `python -m module`, in a session of its own, with its output in a file."""

    def __init__(self, name: str, module: str, argv: Sequence[str], folder: Path) -> None:
        self.name = name
        self.argv = [sys.executable, "-X", "faulthandler", "-m", module, *argv]
        self.log_path = folder / f"{name}.log"
        self.environment: dict[str, str] = {}
        """Beside that of the tests."""
        self._popen: Child | None = None
        self._family: dict[int, psutil.Process] = {}

    def start(self) -> None:
        """Start, or start again with the same flags; the log goes on."""
        assert not self.alive
        self._popen = self._spawn()

    def _spawn(self) -> Child:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error::ResourceWarning"}
        environment |= self.environment
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    @property
    def pid(self) -> int:
        assert self._popen is not None, "not started"
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def family(self) -> list[psutil.Process]:
        """This process and all its children that were ever seen here."""
        if self.alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                me = psutil.Process(self.pid)
                for process in (me, *me.children(recursive=True)):
                    self._family.setdefault(process.pid, process)
        return list(self._family.values())

    def send(self, signum: signal.Signals) -> None:
        """As `kill -SIGNUM`; to this process alone."""
        self.family()
        os.kill(self.pid, signum)

    def wait(self) -> int:
        """The exit code."""
        assert self._popen is not None
        try:
            return self._popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended within {PATIENCE_S:g} s") from None

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; its exit code. Nothing of it is left behind."""
        self.send(signum)
        code = self.wait()
        assert_gone(self.family())
        return code

    def kill(self) -> None:
        """kill -9, also when it is stopped."""
        self.send(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """Make sure that neither it nor a child of it is left, whatever state they are in."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._popen is not None:
            self._popen.wait(PATIENCE_S)
        psutil.wait_procs(self.family(), timeout=PATIENCE_S)

    def assert_clean_log(self, start: int = 0) -> None:
        """No traceback, no leak, no bug was logged, from character `start` of the log on."""
        log = self.log[start:]
        for bad in ("Traceback", "leak", "Error:", "internal error", "Fatal Python error"):
            assert bad not in log, f"{self.name}: {bad!r} in its log\n{log[-LOG_TAIL_CHARS:]}"


class Call:
    """A POST and what has come back so far. Use `finish`, or `hang_up`."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.answer: Any = None
        self.saw_done = False
        self.broken: str | None = None
        self.ended_at: float | None = None
        self._lock = threading.Condition()
        self._connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)
        self._connection.connect()
        self._connection.request(
            "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self._thread = threading.Thread(target=self._read, name=f"call {path}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    @property
    def last(self) -> dict[str, Any]:
        """The last event that is not an error, or the answer."""
        good = [event for event in self.events if "error" not in event]
        return good[-1] if good else (self.answer or {})

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = self.last.get("output_ids", [])
        return ids

    @property
    def error(self) -> str | None:
        """The message of the error, in an event or as the answer."""
        for thing in (*self.events[-1:], self.answer):
            if isinstance(thing, dict) and "error" in thing:
                return str(thing["error"]["message"])
        return None

    def wait_tokens(self, count: int) -> None:
        """Until so many tokens have come."""
        with self._lock:
            came = self._lock.wait_for(lambda: self.ended or len(self.token_ids) >= count, PATIENCE_S)
        assert came, f"{len(self.token_ids)} of {count} tokens within {PATIENCE_S:g} s"
        assert len(self.token_ids) >= count, f"ended with {len(self.token_ids)} tokens: {self.error}"

    def finish(self) -> Call:
        """Wait for the end of the answer, which must come."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), (
            f"no end within {PATIENCE_S:g} s; {len(self.events)} events so far"
        )
        return self

    def hang_up(self) -> None:
        """Go away in the middle of it."""
        with contextlib.suppress(OSError):
            if self._connection.sock is not None:
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def tokens(self) -> list[int]:
        """The tokens of an answer that must be complete and good."""
        self.finish()
        assert self.status == 200 and self.error is None and not self.broken, self.describe()
        assert self.answer is not None or self.saw_done, "the stream did not end with [DONE]"
        return self.token_ids

    def describe(self) -> str:
        return f"status {self.status}, {len(self.token_ids)} tokens, error {self.error!r}, broken {self.broken!r}"

    def _read(self) -> None:
        try:
            response = self._connection.getresponse()
            self.status = response.status
            if response.headers.get_content_type() == "text/event-stream":
                for line in response:
                    self._line(line.decode().rstrip("\n"))
            else:
                self.answer = json.loads(response.read())
            response.close()
        except (OSError, http.client.HTTPException, json.JSONDecodeError, AttributeError) as error:
            self.broken = f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()
            with self._lock:
                self.ended_at = time.monotonic()
                self._lock.notify_all()

    def _line(self, line: str) -> None:
        if not line.startswith("data: "):
            assert not line, f"not an event: {line!r}"
            return
        with self._lock:
            if line == "data: [DONE]":
                self.saw_done = True
            else:
                assert not self.saw_done, "an event after [DONE]"
                self.events.append(json.loads(line[6:]))
                self.times.append(time.monotonic())
            self._lock.notify_all()


@contextlib.contextmanager
def started(*processes: Process) -> Iterator[None]:
    """They run in the block, and their logs are clean afterwards."""
    try:
        for process in processes:
            process.start()
        yield
        assert [process.stop() for process in reversed(processes)] == [0] * len(processes)
        for process in processes:
            process.assert_clean_log()
    finally:
        for process in processes:
            process.close()


class Router(Process):
    """`router` with any flags, on free ports."""

    def __init__(self, folder: Path, *flags: str, name: str = "router") -> None:
        self.port, self.control_port = free_port(), free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._log_start = 0
        """Where the log begins of the process that runs now."""
        ports = ("--port", str(self.port), "--control-port", str(self.control_port))
        patience = ("--node-timeout-s", NO_TIMEOUT_S, "--stop-timeout-s", NO_TIMEOUT_S)
        super().__init__(name, "router", (*ports, *patience, *flags), folder)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON; (0, None) when nobody answers."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if path != "/metrics" else text.decode()
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> Call:
        return Call(self.port, path, body)

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int, **fields: Any) -> Call:
        """POST /generate, greedy, with `ignore_eos`; `sampling` overrides parameters."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        sampling |= fields.pop("sampling", {})
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        return self.post("/generate", {**given, "sampling_params": sampling, **fields})

    def start(self) -> None:
        self._log_start = len(self.log)
        super().start()

    def wait_ready(self, *, nodes: Sequence[Process] = (), patience_s: float = PATIENCE_S) -> Router:
        """Until /health says that all nodes are there, and the generation that proves it is over.

        Neither the router nor any of `nodes` may end meanwhile.
        """

        def ready() -> bool:
            for process in (self, *nodes):
                assert process.alive, f"{process.name} ended with code {process.wait()}\n{process.log}"
            code, health = self.get("/health")
            return code == 200 and health["status"] == "ok" and "\nServing " in self.log[self._log_start :]

        until(ready, "the router is ready", patience_s)
        self.family()
        return self

    def wait_healthy(self) -> None:
        """Until /health says ok."""
        until(lambda: (self.get("/health")[1] or {}).get("status") == "ok", "it is healthy")

    def loads(self) -> dict[str, dict[str, Any]]:
        """The load of each live node, asked for now; a node that answers late is shown with its last one."""
        code, info = self.get("/get_server_info")
        return {load["node_id"]: load for load in info["internal_states"]} if code == 200 else {}

    def wait_home(self, *node_ids: str) -> None:
        """Until the pages and slots of these nodes (all, if none is named) are back.

        A node that answers late is shown with its last load, so two different pongs in a row must say so.
        """
        seen: dict[str, set[int]] = {}

        def home() -> bool:
            loads = self.loads()
            wanted = node_ids or tuple(loads)
            for node_id in wanted:
                load = loads.get(node_id)
                if load is None or not is_home(load):
                    seen.pop(node_id, None)
                else:
                    seen.setdefault(node_id, set()).add(load["progress"])
            return bool(wanted) and all(len(seen.get(node_id, ())) >= 2 for node_id in wanted)

        until(home, lambda: f"pages and slots are back: {json.dumps(self.loads())}")

    def __enter__(self) -> Router:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print_logs(self)
        self.close()


def is_home(load: dict[str, Any]) -> bool:
    """A node's load says that it holds nothing: every page is free or merely cached, no slot is taken."""
    waiting = ("num_running", "num_waiting", "num_transferring", "num_bootstrapping", "num_held_pages")
    free = load["num_free_pages"] + load["num_evictable_pages"]
    return free == load["num_pages"] > 0 and not any(load[name] for name in waiting)


class Node(Process):
    """`prefill-node` or `decode-node`, started by hand. Its process is forked, unless it has an `environment`."""

    def __init__(self, folder: Path, role: str, name: str, *flags: str) -> None:
        self.role = role
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        argv = ("--port", str(self.port), "--node-id", name, *flags)
        super().__init__(name, f"{role}_node", argv, folder)

    def _spawn(self) -> Child:
        if self.environment:
            return super()._spawn()
        return Forked(self.log_path, run_module, f"{self.role}_node", self.argv[5:])


class Fleet:
    """`pPdD` nodes named p0, p1, .., d0, .., and a router that was told their addresses."""

    def __init__(
        self,
        folder: Path,
        model: Path | str,
        topology: str = "1P1D",
        *,
        flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        new_node: Callable[..., Node] = Node,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        folder.mkdir(parents=True, exist_ok=True)
        num_prefill, num_decode = (int(n) for n in topology.rstrip("D").split("P"))
        common = ("--model", str(model), *NODE_FLAGS, *flags)
        self.nodes = {
            f"{role[0]}{i}": new_node(folder, role, f"{role[0]}{i}", *common, *more)
            for role, count, more in (
                ("prefill", num_prefill, prefill_flags),
                ("decode", num_decode, decode_flags),
            )
            for i in range(count)
        }
        joins = [part for node in self.nodes.values() for part in (f"--{node.role}", node.address)]
        self.router = Router(folder, *joins, *router_flags)

    def start(self) -> Fleet:
        """Start all at once and wait until the router serves."""
        for process in self.processes:
            process.start()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Until every node serves."""
        self.router.wait_ready(nodes=list(self.nodes.values()), patience_s=self._patience_s)

    @property
    def processes(self) -> list[Process]:
        return [*self.nodes.values(), self.router]

    def mend(self) -> None:
        """Whatever a test did: every node runs again and holds nothing."""
        for node in self.nodes.values():
            if not node.alive:
                node.start()
            node.send(signal.SIGCONT)
        self.wait_ready()
        self.router.wait_home(*self.nodes)

    def stop(self) -> None:
        """End it as an operator would: exit codes 0, nothing left, nothing ugly in a log."""
        codes = {process.name: process.stop() for process in reversed(self.processes)}
        assert set(codes.values()) == {0}, codes
        for process in self.processes:
            process.assert_clean_log()

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.close()

    def __enter__(self) -> Fleet:
        try:
            return self.start()
        except BaseException:
            print_logs(*self.processes)
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print_logs(*self.processes)
        self.close()


def print_logs(*processes: Process) -> None:
    """The ends of their logs, where pytest shows them with the failure."""
    for process in processes:
        print(f"---------- {process.name}: {' '.join(process.argv[4:])}\n{process.log[-LOG_TAIL_CHARS:]}")


def attach_logs(item: pytest.Item, report: pytest.TestReport) -> None:
    """Show the logs of a failed test's fleets and routers."""
    if not isinstance(item, pytest.Function):
        return
    for value in item.funcargs.values():
        processes = value.processes if isinstance(value, Fleet) else [value]
        for process in processes:
            if isinstance(process, Process):
                report.sections.append((f"log of {process.name}", process.log[-LOG_TAIL_CHARS:]))
