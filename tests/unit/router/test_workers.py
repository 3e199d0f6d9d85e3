"""`router --router-workers 2` as processes, with scripted nodes: two routers on one port, each independent."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.patience import PATIENCE_S, until
from tests.processes import free_port
from tests.unit.router.stub_node import write_packages
from tests.unit.router.test_processes import SHORT_DRAIN, RunningRouter

PLAIN = False  # there is no TLS: a client for every request need not read certificates


class TwoRouters(RunningRouter):
    """Every request has a connection of its own; `url` is the port that both share, `own` those that they do not."""

    def __init__(self, folder: Path, model_folder: Path, *args: str) -> None:
        self.prometheus_port = free_port()
        flags = ("--router-workers", "2", "--prometheus-port", str(self.prometheus_port), *SHORT_DRAIN)
        super().__init__(folder, *flags, "--model", str(model_folder), *args, delay_s="0.1")
        self.url = ""

    def own(self, index: int) -> str:
        return f"http://127.0.0.1:{self.prometheus_port + index}"

    def get(self, index: int, path: str) -> httpx.Response:
        return httpx.get(self.own(index) + path, timeout=PATIENCE_S, verify=PLAIN)

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=body, timeout=PATIENCE_S, verify=PLAIN)

    def num_requests(self, index: int) -> float:
        found = re.search(r"^sglang:num_requests_total{.*} (\S+)$", self.get(index, "/metrics").text, re.M)
        return float(found[1]) if found else 0.0


@contextlib.contextmanager
def serving(tmp_path: Path, model_folder: Path, *args: str) -> Iterator[TwoRouters]:
    write_packages(tmp_path)
    router = TwoRouters(tmp_path, model_folder, *args)
    try:
        router.url = router.until_serving()
        router.until_logged("router_is_ready", 2)
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
    """A stream that does not end by itself, and the thread that reads it."""

    def __init__(self, url: str, rid: str) -> None:
        self.last = ""
        self.started = threading.Event()
        body: dict[str, Any] = {"text": "a" * 99, "rid": rid, "stream": True}
        self._body = {**body, "sampling_params": {"max_new_tokens": 1_000_000}}
        self._url = url
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        assert self.started.wait(PATIENCE_S)

    def _read(self) -> None:
        post = httpx.stream(
            "POST", f"{self._url}/generate", json=self._body, timeout=PATIENCE_S, verify=PLAIN
        )
        with contextlib.suppress(httpx.TransportError), post as answer:
            for line in answer.iter_lines():
                self.last = line if line and "[DONE]" not in line else self.last
                self.started.set()

    def end(self) -> str:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), self.last
        return self.last


def test_two_routers_share_a_port_and_die_alone(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path, model_folder) as router:
        assert router.stdout.count("Serving ") == 1 and router.stdout.count("def fibonacci") == 1
        before = [router.num_requests(index) for index in range(2)]
        assert before == [1, 0], "the proof"
        short = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        num_asked = 0
        while any(router.num_requests(index) == before[index] for index in range(2)):
            assert num_asked < 40, "that all connections are for one has a probability of 2 ** -39"
            num_asked += 1
            assert router.post(short).status_code == 200
        assert sum(router.num_requests(index) for index in range(2)) == num_asked + 1
        infos = [router.get(index, "/get_server_info").json() for index in range(2)]
        assert [info["router_index"] for info in infos] == [0, 1]
        assert [info["prometheus_port"] for info in infos] == [
            router.prometheus_port,
            router.prometheus_port + 1,
        ]
        assert len({info["router_incarnation"] for info in infos}) == 2

        dying, living = Stream(router.own(1), "a"), Stream(router.own(0), "b")
        os.kill(router.pid_of("1"), signal.SIGKILL)
        dying.end()
        assert "finish_reason" in dying.last and '"length"' not in dying.last
        assert living.thread.is_alive()
        router.until_logged("router_exited router=1 code=-9 restart_in_s=0.5")
        for _ in range(6):  # the kernel gives no connection to a process that is gone
            assert router.post(short).status_code == 200
        router.until_logged("router_is_ready router=1", 2)
        until(lambda: router.get(1, "/health").json()["status"] == "ok", "it serves at its old address")
        assert living.thread.is_alive()
        router.process.terminate()
        assert "shutting down" in living.end()


def test_nothing_is_left_of_a_supervisor_that_was_killed(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path, model_folder) as router:
        stream = Stream(router.url, "s")
        assert len(router.children) == 4
        router.process.kill()
        router.end()
        router.assert_no_orphan()
        stream.end()


def test_a_supervisor_that_starts_waits_for_nothing_when_told_to_stop(
    tmp_path: Path, model_folder: Path
) -> None:
    write_packages(tmp_path)
    router = TwoRouters(tmp_path, model_folder, "--stop-timeout-s", "100")
    try:
        router.until_logged("router_started router=0")
        router.process.terminate()
        assert router.end() == 0 and "router_killed" not in router.stderr
        router.assert_no_orphan()
    finally:
        router.process.kill()
        router.end()
