"""`router --router-workers 2` as processes, with scripted nodes: what holds across workers, and who dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.router.stub_node import write_packages
from tests.unit.router.test_processes import RunningRouter, _alive

pytestmark = pytest.mark.processes

WORKERS = {"0", "1"}
SHORT = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
MANY = 40  # connections; that none of them is for one worker has a probability of 2 ** -39
PLAIN = False  # there is no TLS: a client for every request need not read certificates


class TwoWorkers(RunningRouter):
    """Every request has a connection of its own, so the kernel chooses a worker for each."""

    def __init__(self, folder: Path, model_folder: Path, *args: str) -> None:
        super().__init__(folder, "--router-workers", "2", "--model", str(model_folder), *args)
        self.url = ""

    @property
    def worker_pids(self) -> dict[str, int]:
        """Of the latest process of each worker."""
        return {
            name: int(pid) for name, pid in re.findall(r"worker_started worker=(\d) pid=(\d+)", self.stderr)
        }

    @property
    def children(self) -> list[int]:
        return super().children + [int(pid) for pid in re.findall(r"worker_started .*pid=(\d+)", self.stderr)]

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = 10) -> httpx.Response:
        return httpx.request(method, self.url + path, json=body, timeout=timeout_s, verify=PLAIN)

    @contextlib.contextmanager
    def connected_to(self, worker: str) -> Iterator[httpx.Client]:
        """A connection that is kept."""
        for _ in range(50):
            with httpx.Client(base_url=self.url, timeout=10, verify=PLAIN) as client:
                if client.get("/get_server_info").json()["router_worker"] == worker:
                    yield client
                    return
        raise AssertionError(f"never worker {worker}")

    def of_each(self, path: str) -> dict[str, Any]:
        """What each worker answers that says its name."""
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + 10
        while set(answers) != WORKERS:
            assert time.monotonic() < deadline, f"heard only {set(answers)}\n{self.stderr}"
            answer = self.request("GET", path).json()
            answers[answer["router_worker"]] = answer
        return answers

    def metric(self, name: str) -> dict[str, float]:
        """By worker; the samples of anything but workers have the name of their node."""
        text = self.request("GET", "/metrics").text
        found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in\n{text}"
        return {re.search(r'(?:worker|node)="([^"]+)"', labels)[1]: float(value) for labels, value in found}  # type: ignore[index]


@contextlib.contextmanager
def serving(tmp_path: Path, model_folder: Path, *args: str) -> Iterator[TwoWorkers]:
    write_packages(tmp_path)
    router = TwoWorkers(tmp_path, model_folder, *args)
    try:
        router.url = router.until_serving()
        yield router
        if router.process.poll() is None:
            router.process.terminate()
        assert router.end() in (0, -signal.SIGKILL), router.stderr
        assert "Traceback" not in router.stderr, router.stderr
        router.assert_no_orphan()
    finally:
        router.process.kill()
        router.end()


class Stream:
    """A long one, that a thread reads."""

    def __init__(self, router: TwoWorkers, rid: str) -> None:
        self.rid = rid
        self.last = ""
        self.started = threading.Event()
        self._router = router
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        assert self.started.wait(10)

    def _read(self) -> None:
        body = {
            "text": "a" * 99,
            "rid": self.rid,
            "stream": True,
            "sampling_params": {"max_new_tokens": 1500},
        }
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream(
                "POST", f"{self._router.url}/generate", json=body, timeout=30, verify=PLAIN
            ) as answer,
        ):
            for line in answer.iter_lines():
                self.last = line if line and "[DONE]" not in line else self.last
                self.started.set()

    def end(self) -> str:
        self.thread.join(10)
        assert not self.thread.is_alive(), self.last
        return self.last


def until(check: Callable[[], object], what: str, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_two_workers_are_one_router(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path, model_folder) as router:
        assert router.stdout.count("Serving ") == 1 and router.stdout.count("def fibonacci") == 1
        num_asked = 0
        while num_asked < 12 or set(router.metric("sglang:num_requests_total")) != WORKERS:
            assert num_asked < MANY
            num_asked += 1
            answer = router.request(
                "POST", "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}
            )
            assert answer.status_code == 200
        counted = router.metric("sglang:num_requests_total")
        assert set(counted) == WORKERS and sum(counted.values()) == num_asked + 1, "and the proof"
        assert router.metric("baton:router_worker_up") == {"0": 1.0, "1": 1.0}
        assert set(router.metric("sglang:num_running_reqs")) == {"prefill-0", "decode-0"}, "each node once"
        text = router.request("GET", "/metrics").text
        families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(families) == len(set(families)), "Prometheus refuses a family that is told twice"
        infos = router.of_each("/get_server_info")
        assert all(info["router_workers"] == 2 for info in infos.values())
        assert router.request("POST", "/flush_cache").status_code == 200
        assert router.request("POST", "/start_profile").status_code == 200

        streams = [Stream(router, f"s{at}") for at in range(8)]
        while not all(router.metric("sglang:num_requests_total")[name] > counted[name] for name in WORKERS):
            assert len(streams) < MANY, "nothing has to cross"
            streams.append(Stream(router, f"s{len(streams)}"))
        for stream in streams[:4]:
            told = router.request("POST", "/abort_request", {"rid": stream.rid})
            assert told.json() == {"success": True, "aborted": 1}
            assert '"abort"' in stream.end()
        told = router.request("POST", "/abort_request", {"abort_all": True})
        assert told.json() == {"success": True, "aborted": len(streams) - 4}
        assert all('"abort"' in stream.end() for stream in streams)

        # What is changed by one worker holds for all, also for one that is started later.
        address = {n["node_id"]: n["address"] for n in router.request("GET", "/fleet").json()["nodes"]}[
            "decode-0"
        ]
        removed = router.request("DELETE", "/fleet/nodes/prefill-0")
        assert removed.json()["success"] is True and "missing_workers" not in removed.json()

        def nodes() -> dict[str, list[str]]:
            views = router.of_each("/fleet")
            return {name: [node["node_id"] for node in view["nodes"]] for name, view in views.items()}

        assert nodes() == {"0": ["decode-0"], "1": ["decode-0"]}
        before = router.worker_pids
        os.kill(before["1"], signal.SIGKILL)
        until(lambda: "worker_exited worker=1 code=-9" in router.stderr, "its sockets are closed")
        for _ in range(6):  # the other goes on
            assert router.request("POST", "/generate", SHORT).status_code == 200
        until(lambda: router.stderr.count("worker_ready worker=1") == 2, "it comes back")
        assert router.worker_pids["0"] == before["0"] and router.worker_pids["1"] != before["1"]
        assert nodes() == {"0": ["decode-0"], "1": ["decode-0"]}
        added = router.request("POST", "/fleet/nodes", {"role": "decode", "address": address})
        assert added.json()["success"] is True and "missing_workers" not in added.json()

        # One that does not answer is named, and not waited for.
        with router.connected_to("1") as client:
            os.kill(router.worker_pids["0"], signal.SIGSTOP)
            metrics = client.get("/metrics").text
            told = client.post("/abort_request", json={"rid": "x"}).json()
            os.kill(router.worker_pids["0"], signal.SIGCONT)
        up = re.findall(r'^baton:router_worker_up{worker="(\d)"} (\S+)$', metrics, re.MULTILINE)
        assert up == [("0", "0.0"), ("1", "1.0")]
        missing = {"0": "no answer within 2 s"}
        assert told == {"success": True, "aborted": 0, "missing_workers": missing}

        stream = Stream(router, "last")
        router.process.terminate()
        assert "shutting down" in stream.end()


def test_sighup_while_a_worker_starts(tmp_path: Path, model_folder: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("first-key\n")
    with serving(tmp_path, model_folder, "--api-key-file", str(key_file)) as router:
        os.kill(router.worker_pids["1"], signal.SIGKILL)
        until(lambda: router.stderr.count("worker_started worker=1") == 2, "it is started again")
        assert "restart_in_s=0.5" in router.stderr, "the first pause is the shortest"
        key_file.write_text("second-key\n")
        router.process.send_signal(signal.SIGHUP)
        until(lambda: router.stderr.count("api_keys_read") == 2, "both have read the new key")
        until(lambda: router.stderr.count("worker_ready worker=1") == 2, "it comes back")
        os.kill(router.worker_pids["0"], signal.SIGHUP)
        headers = {"Authorization": "Bearer second-key"}
        for _ in range(8):
            answer = httpx.get(f"{router.url}/v1/models", headers=headers, timeout=10, verify=PLAIN)
            assert answer.status_code == 200
        assert router.stderr.count("worker_exited") == 1


def test_nothing_is_left_of_a_parent_that_was_killed(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path, model_folder) as router:
        stream = Stream(router, "s")
        assert len(router.children) == 4 and all(_alive(pid) for pid in router.children)
        router.process.kill()
        router.end()
        router.assert_no_orphan()
        stream.end()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--chat-template", "/no/such/template"), "cannot be read"),
        (("--model", "/no/such/model"), "neither a folder nor a hub id"),
    ],
)
def test_workers_that_cannot_start(
    tmp_path: Path, model_folder: Path, flags: tuple[str, ...], words: str
) -> None:
    write_packages(tmp_path)
    router = TwoWorkers(tmp_path, model_folder, *flags)
    try:
        assert router.end() == 2, router.stderr
        assert router.stderr.count("router: error:") == 1 and words in router.stderr
        assert not re.search("node_started", router.stderr), "what can go wrong at once comes first"
        assert "Traceback" not in router.stderr
        router.assert_no_orphan()
    finally:
        router.process.kill()
        router.end()


def test_a_node_that_cannot_load_ends_workers_too(tmp_path: Path, model_folder: Path) -> None:
    write_packages(tmp_path)
    flags = ("--router-workers", "2", "--model", str(model_folder))
    router = RunningRouter(tmp_path, *flags, decode_0="fail")
    try:
        assert router.end() == 2, router.stderr
        assert "router: error: decode-0 could not start: the weights are gone" in router.stderr
        router.assert_no_orphan()
    finally:
        router.process.kill()
        router.end()


def test_a_port_that_another_router_shares_is_refused(tmp_path: Path, model_folder: Path) -> None:
    write_packages(tmp_path)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        router = TwoWorkers(tmp_path, model_folder, "--port", str(other.getsockname()[1]))
        try:
            assert router.end() == 2
        finally:
            router.process.kill()
            router.end()
    assert "choose another --port" in router.stderr and not router.children
