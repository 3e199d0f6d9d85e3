"""`router` and the demo as processes, with scripted nodes as children: signals, exit codes, orphans, restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.patience import PATIENCE_S, until
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


@pytest.fixture
def started(folder: Path) -> Iterator[list[RunningRouter]]:
    """Routers to be killed at the end of a test, whatever happened."""
    routers: list[RunningRouter] = []
    yield routers
    for router in routers:
        if router.process.poll() is None:
            router.process.kill()
        router.end()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_serve_and_stop(
    folder: Path, model_folder: Path, started: list[RunningRouter], signum: signal.Signals
) -> None:
    router = RunningRouter(folder, "--model", str(model_folder), "--page-size", "8", *SHORT_DRAIN)
    started.append(router)
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
    assert "Traceback" not in router.stderr
    router.assert_no_orphan()


def test_no_key_is_told(folder: Path, model_folder: Path, started: list[RunningRouter]) -> None:
    key_file = folder / "keys"
    key_file.write_text("# ours\nfirst-key\n")
    flags = ("--model", str(model_folder), "--api-key-file", str(key_file), "--log-requests")
    router = RunningRouter(folder, *flags)
    started.append(router)
    url = router.until_serving()
    assert "Authorization: Bearer KEY" in router.stdout

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE_S, verify=PLAIN).status_code

    assert (status("first-key"), status("second-key")) == (200, 401)
    router.process.terminate()
    assert router.end() == 0
    assert 'route="GET /v1/models" status=401' in router.stderr
    assert (
        "first-key" not in router.stdout + router.stderr and "second-key" not in router.stdout + router.stderr
    )


def test_no_orphan_after_kill_9(folder: Path, model_folder: Path, started: list[RunningRouter]) -> None:
    router = RunningRouter(folder, "--model", str(model_folder))
    started.append(router)
    router.until_serving()
    assert len(router.children) == 3 and all(_alive(pid) for pid in router.children)
    router.process.kill()
    router.assert_no_orphan()


def test_nodes_that_die_are_started_again(
    folder: Path, model_folder: Path, started: list[RunningRouter]
) -> None:
    router = RunningRouter(
        folder, "--model", str(model_folder), "--local", "2P1D", "--failover-timeout-s", "0.5"
    )
    started.append(router)
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
    router.assert_no_orphan()


def test_a_child_that_cannot_load(folder: Path, model_folder: Path, started: list[RunningRouter]) -> None:
    router = RunningRouter(folder, "--model", str(model_folder), decode_0="fail")
    started.append(router)
    assert router.end() == 2
    assert "router: error: decode-0 could not start: the weights are gone" in router.stderr
    assert "Traceback" not in router.stderr
    router.assert_no_orphan()


def test_a_child_that_ends_before_it_says_a_word(
    folder: Path, model_folder: Path, started: list[RunningRouter]
) -> None:
    router = RunningRouter(
        folder, "--model", str(model_folder), "--kv-slots", "2"
    )  # the stub knows no such flag
    started.append(router)
    assert router.end() == 2
    assert "exited with code 2 before it was ready" in router.stderr
    router.assert_no_orphan()


def test_a_child_that_does_not_stop(folder: Path, model_folder: Path, started: list[RunningRouter]) -> None:
    args = ("--model", str(model_folder), "--stop-timeout-s", "0.5")
    router = RunningRouter(folder, *args, prefill_0="stubborn")
    started.append(router)
    router.until_serving()
    router.process.terminate()
    assert router.end() == 0
    assert "node_killed node=prefill-0" in router.stderr
    router.assert_no_orphan()


def test_demo(folder: Path, model_folder: Path, started: list[RunningRouter]) -> None:
    router = RunningRouter(folder, "--model", str(model_folder), module="router.demo")
    started.append(router)
    assert router.end() == 0, router.stderr
    last = json.loads(router.stdout.splitlines()[-1])
    assert last["text"].startswith("The quick brown") and last["completion_tokens"] == 48
    assert (last["kv_pages_transferred"], last["kv_bytes_transferred"]) == (3, 3000)
    assert last["prompt_tokens"] > 16 and last["ttft_s"] > 0 and last["tpot_s"] > 0
    assert "transferring" in router.stdout
    assert "Traceback" not in router.stderr


def test_a_port_in_use(folder: Path, model_folder: Path, started: list[RunningRouter]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        router = RunningRouter(folder, "--model", str(model_folder), "--port", str(taken.getsockname()[1]))
        started.append(router)
        assert router.end() == 2
    assert "choose another --port" in router.stderr and "Traceback" not in router.stderr
    assert not router.children


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--chat-template", "/no/such/template"), "cannot be read"),
        (("--model", "/no/such/model"), "neither a folder nor a hub id"),
        (("--api-key-file", "/no/such/keys"), "cannot be read"),
    ],
)
def test_a_wrong_flag_starts_no_node(
    folder: Path, model_folder: Path, started: list[RunningRouter], flags: tuple[str, ...], words: str
) -> None:
    router = RunningRouter(folder, "--model", str(model_folder), "--router-workers", "2", *flags)
    started.append(router)
    assert router.end() == 2, router.stderr
    assert router.stderr.count("router: error:") == 1 and words in router.stderr
    assert "node_started" not in router.stderr and "Traceback" not in router.stderr
    router.assert_no_orphan()


def test_a_router_that_dies_before_its_nodes_come_is_started_again(
    folder: Path, model_folder: Path, started: list[RunningRouter]
) -> None:
    router = RunningRouter(folder, "--local", "none", "--control-port", "0", "--model", str(model_folder))
    started.append(router)
    router.until_logged("router_listening")
    os.kill(router.pid_of("0"), signal.SIGKILL)
    router.until_logged("router_exited router=0 code=-9 restart_in_s=0.5")
    router.until_logged("router_listening", count=2)
    router.process.terminate()
    assert router.end() == 0 and "Traceback" not in router.stderr
    router.assert_no_orphan()


def test_two_routers_on_one_machine(folder: Path, model_folder: Path, started: list[RunningRouter]) -> None:
    with socket.create_server(("127.0.0.1", 8001)):  # what used to be the default control port is taken
        for _ in range(2):
            started.append(RunningRouter(folder, "--model", str(model_folder), log=str(len(started))))
        assert started[0].until_serving() != started[1].until_serving()
