"""`router` and the demo as processes, with scripted nodes as children: signals, exit codes, orphans, restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.patience import PATIENCE_S, until
from tests.processes import free_port
from tests.unit.router.stub_node import HOLD, write_packages

PLAIN = False  # there is no TLS: a client for every request need not read certificates

ROOT = Path(__file__).resolve().parents[3]


SHORT_DRAIN = ("--drain-timeout-s", "0.5")


class RunningRouter:
    """`python -m <module> --local 1P1D` with scripted nodes, in a folder where they shadow the real ones."""

    def __init__(
        self, folder: Path, *args: str, module: str = "router", log: str = "stderr", **modes: str
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"}
        environment |= {f"STUB_{name.upper()}": mode for name, mode in modes.items()}
        self.stderr_file = folder / log
        with self.stderr_file.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--port", "0", *args],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.stdout = ""

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text()

    @property
    def children(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"(?:node|router)_started .*pid=(\d+)", self.stderr)]

    def pid_of(self, name: str) -> int:
        """Of the latest process of a node or a router."""
        return int(re.findall(rf"_started (?:node|router)={name} pid=(\d+)", self.stderr)[-1])

    def until_serving(self) -> str:
        """Read its standard output up to the curl line; returns the URL."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.stdout += line
            if line.lstrip().startswith("-d '{"):
                break
        found = re.search(r"at (http://\S+): open", self.stdout)
        assert found, self.stdout + self.stderr
        return found[1]

    def end(self) -> int:
        """Wait for it; returns its exit code."""
        assert self.process.stdout is not None
        self.process.wait(PATIENCE_S)
        if not self.process.stdout.closed:
            self.stdout += self.process.stdout.read()
            self.process.stdout.close()
        return self.process.returncode

    def until_logged(self, words: str, count: int = 1) -> None:
        until(lambda: self.stderr.count(words) >= count, lambda: f"{words!r} is logged\n{self.stderr}")

    def assert_no_orphan(self) -> None:
        until(lambda: not any(map(_alive, self.children)), lambda: f"no child is left\n{self.stderr}")


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_packages(tmp_path)
    return tmp_path


Start = Callable[..., RunningRouter]


@pytest.fixture
def start(folder: Path, model_folder: Path) -> Iterator[Start]:
    """Starts routers, which are killed at the end of a test, whatever happened. At a right end nothing is left."""
    routers: list[RunningRouter] = []

    def started(*args: str, **options: str) -> RunningRouter:
        log = f"stderr{len(routers)}"
        routers.append(RunningRouter(folder, "--model", str(model_folder), *args, log=log, **options))
        return routers[-1]

    yield started
    for router in routers:
        if router.process.poll() is None:
            router.process.kill()
        router.end()
        assert "Traceback" not in router.stderr, router.stderr
        router.assert_no_orphan()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_serve_and_stop(start: Start, signum: signal.Signals) -> None:
    router = start("--page-size", "8", *SHORT_DRAIN)
    url = router.until_serving()
    assert "def fibonacci" in router.stdout and "The quick brown" in router.stdout
    assert re.search(rf"router_ready .*http_port={url.rpartition(':')[2]}", router.stderr)
    assert "prefill-0: weights" in router.stderr and "decode-0: ready" in router.stderr
    assert len(router.children) == 3
    with httpx.Client(base_url=url, timeout=PATIENCE_S, verify=PLAIN) as client:
        assert client.get("/health").json()["status"] == "ok"
        params = {"max_new_tokens": 1_000_000}
        with client.stream(
            "POST", "/generate", json={"text": "a", "stream": True, "sampling_params": params}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            router.process.send_signal(signum)
            rest = [line for line in lines if line]
        assert "shutting down" in rest[-2] and rest[-1] == "data: [DONE]"
    assert router.end() == 0


def test_a_router_that_stops_lets_its_requests_end(start: Start) -> None:
    router = start("--page-size", "8")
    with httpx.Client(base_url=router.until_serving(), timeout=PATIENCE_S, verify=PLAIN) as client:
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 100}}
        with client.stream("POST", "/generate", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            router.process.send_signal(signal.SIGTERM)
            *_, last, done = [line for line in lines if line]
    assert '"length"' in last and done == "data: [DONE]"
    assert router.end() == 0


def test_no_key_is_told(folder: Path, start: Start) -> None:
    key_file = folder / "keys"
    key_file.write_text("# ours\nfirst-key\n")
    router = start("--api-key-file", str(key_file), "--log-requests")
    url = router.until_serving()
    assert "Authorization: Bearer KEY" in router.stdout

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE_S, verify=PLAIN).status_code

    assert (status("first-key"), status("second-key")) == (200, 401)
    router.process.terminate()
    assert router.end() == 0
    assert 'route="GET /v1/models" status=401' in router.stderr
    assert not any(key in router.stdout + router.stderr for key in ("first-key", "second-key"))


def test_nodes_that_die_are_started_again(folder: Path, start: Start) -> None:
    router = start("--local", "2P1D", "--failover-timeout-s", "0.5")
    url = router.until_serving()
    before = {name: router.pid_of(name) for name in ("prefill-0", "decode-0")}
    hold = folder / HOLD
    hold.touch()  # the nodes that are started again join only when the test has seen what it wants to see
    with httpx.Client(base_url=url, timeout=PATIENCE_S, verify=PLAIN) as client:
        os.kill(before["prefill-0"], signal.SIGKILL)
        until(lambda: "prefill-0 is lost" in client.get("/health").json().get("reason", ""))
        until(lambda: "was killed by SIGKILL; started again in 0.5 s" in client.get("/health").text)
        health = client.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        assert client.post("/generate", json={"text": "a" * 99}).status_code == 200
        router.until_logged("node_exited node=prefill-0 code=-9 restart_in_s=0.5")
        os.kill(before["decode-0"], signal.SIGKILL)
        until(lambda: client.get("/health").status_code != 200)
        assert "decode-0 is lost" in client.get("/health").json()["reason"]
        assert client.post("/generate", json={"text": "a"}).status_code == 503
        hold.unlink()
        until(lambda: client.get("/health").json()["status"] == "ok")
        assert client.post("/generate", json={"text": "a"}).status_code == 200
        assert len(client.get("/fleet").json()["nodes"]) == 3, "nothing is left of those that died"
    assert all(router.pid_of(name) != pid for name, pid in before.items())
    router.process.terminate()
    assert router.end() == 0


@pytest.mark.parametrize(
    ("args", "modes", "words"),
    [
        ((), {"decode_0": "fail"}, "decode-0 could not start: the weights are gone"),
        # The stub knows no such flag.
        (("--kv-slots", "2"), {}, "exited with code 2 before it was ready"),
    ],
)
def test_a_child_that_cannot_load(
    start: Start, args: tuple[str, ...], modes: dict[str, str], words: str
) -> None:
    router = start(*args, **modes)
    assert router.end() == 2
    assert words in router.stderr


def test_a_child_that_does_not_stop(start: Start) -> None:
    router = start("--stop-timeout-s", "0.5", prefill_0="stubborn")
    router.until_serving()
    router.process.terminate()
    assert router.end() == 0
    assert "node_killed node=prefill-0" in router.stderr


def test_demo(start: Start) -> None:
    router = start(module="router.demo")
    assert router.end() == 0, router.stderr
    last = json.loads(router.stdout.splitlines()[-1])
    assert last["text"].startswith("The quick brown") and last["completion_tokens"] == 48
    assert (last["kv_pages_transferred"], last["kv_bytes_transferred"]) == (3, 3000)
    assert last["prompt_tokens"] > 16 and last["ttft_s"] > 0 and last["tpot_s"] > 0
    assert "transferring" in router.stdout


def test_a_wrong_flag_starts_no_node(start: Start) -> None:
    router = start("--router-workers", "2", "--api-key-file", "/no/such/keys")
    assert router.end() == 2, router.stderr
    assert router.stderr.count("router: error:") == 1 and "/no/such/keys" in router.stderr
    assert "node_started" not in router.stderr


def test_a_router_that_dies_before_its_nodes_come_is_started_again(start: Start) -> None:
    router = start("--local", "none", "--control-port", "0")
    router.until_logged("router_listening")
    os.kill(router.pid_of("0"), signal.SIGKILL)
    router.until_logged("router_exited router=0 code=-9 restart_in_s=0.5")
    router.until_logged("router_listening", count=2)
    router.process.terminate()
    assert router.end() == 0


# --------------------------------------------------------------------------------- several router processes
def test_router_processes_share_a_port_and_each_has_its_own(start: Start) -> None:
    first_port = free_port()
    router = start("--router-workers", "2", "--prometheus-port", str(first_port), *SHORT_DRAIN)
    url = router.until_serving()
    router.until_logged("router_is_ready", 2)
    assert router.stdout.count("Serving ") == 1 and len(router.children) == 4

    def info(port: str | int) -> dict[str, Any]:
        url = f"http://127.0.0.1:{port}/server_info"
        told: dict[str, Any] = httpx.get(url, timeout=PATIENCE_S, verify=PLAIN).json()
        return told

    infos = [info(first_port + index) for index in range(2)]
    assert [(one["router_index"], one["prometheus_port"]) for one in infos] == [
        (index, first_port + index) for index in range(2)
    ]
    shared = url.rpartition(":")[2]
    seen = {info(shared)["router_index"] for _ in range(40)}  # all are for one with a probability of 2 ** -39
    assert seen == {0, 1}
    router.process.kill()
    router.end()
    router.assert_no_orphan()


def test_a_supervisor_that_starts_waits_for_nothing_when_told_to_stop(start: Start) -> None:
    router = start("--router-workers", "2", "--stop-timeout-s", "100", *SHORT_DRAIN)
    router.until_logged("router_started router=0")
    router.process.terminate()
    assert router.end() == 0 and "router_killed" not in router.stderr
