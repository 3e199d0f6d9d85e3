"""The HTTP port of a node: what it says of a node in each state, and what odd and hostile clients get."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.engine.node_http import MAX_CONNECTIONS, MAX_HEADER_BYTES, STILL_S, InRole, NodeHttp, NodeStatus
from shared.errors import ConfigError
from shared.protocol.messages import Load, Role
from tests.patience import PATIENCE_S, until

HOST = "127.0.0.1"


@dataclass
class Node:
    """What the port reads, and the port."""

    now: float = 100.0
    load: Load = field(default_factory=Load)
    draining: bool = False

    def __post_init__(self) -> None:
        self.status = NodeStatus("tiny", lambda: self.now)
        self.in_role = InRole(
            role=Role.DECODE, node_id="d0", load=lambda: self.load, is_draining=lambda: self.draining
        )

    def get(self, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            response = connection.getresponse()
            assert response.headers["connection"] == "close"
            return response.status, response.read().decode()

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection((HOST, self.port), timeout=PATIENCE_S)
        client.sendall(data)
        return client

    def answer_to(self, data: bytes) -> bytes:
        """All that comes back until the server closes."""
        with self.connect(data) as client:
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(4096), b""))

    @contextlib.contextmanager
    def listening(self, exchange_s: float = 2 * PATIENCE_S) -> Iterator[Node]:
        with NodeHttp(HOST, 0, self.status, exchange_s) as served:
            self.port = served.port
            yield self


@pytest.fixture
def node() -> Iterator[Node]:
    with Node().listening() as node:
        yield node


def test_a_node_from_its_start_to_its_end(node: Node) -> None:
    assert node.get("/live") == (200, "ok\n"), "a model that takes an hour to load is no reason for a restart"
    assert node.get("/ready") == (503, "the model is being loaded\n")
    assert node.get("/metrics")[0] == 200
    node.status.serves(node.in_role)
    assert node.get("/live") == node.get("/ready") == (200, "ok\n")
    node.draining = True
    assert node.get("/ready") == (503, "the node is draining\n")
    assert node.get("/live")[0] == 200, "a node that drains is not to be killed"
    node.status.serves_not("it becomes a prefill node")
    assert node.get("/ready") == (503, "it becomes a prefill node\n")
    assert node.get("/live")[0] == 200


def test_a_loop_that_stands_still_is_not_live(node: Node) -> None:
    node.status.serves(node.in_role)
    assert node.get("/live")[0] == 200
    node.now += STILL_S
    assert node.get("/live")[0] == 200
    node.now += 1
    assert (
        node.get("/live") == node.get("/ready") == (503, f"the loop has stood still for {STILL_S + 1:g} s\n")
    )
    node.load = Load(progress=1)
    assert node.get("/live")[0] == 200
    node.now += 1000
    node.load = Load(progress=2)
    assert node.get("/live")[0] == 200, "seldom asked, and it has gone on since"


def test_a_node_that_leaks_is_not_ready(node: Node) -> None:
    node.status.serves(node.in_role)
    node.load = Load(leak="page 7 has no owner")
    assert node.get("/ready") == (503, "the node leaks KV pages: page 7 has no owner\n")
    assert node.get("/live")[0] == 200


def test_metrics_are_those_of_this_node(node: Node) -> None:
    assert "d0" not in node.get("/metrics")[1], "it serves nothing yet"
    node.status.serves(node.in_role)
    node.load = Load(
        num_waiting=3, num_pages=10, num_free_pages=4, num_evictable_pages=1, kv_bytes_transferred=5
    )
    families = {f.name: f for f in text_string_to_metric_families(node.get("/metrics?name=x")[1])}
    labels = {"model_name": "tiny", "role": "decode", "node": "d0"}
    for name, value in (
        ("sglang:num_queue_reqs", 3),
        ("sglang:token_usage", 0.5),
        ("baton:kv_transfer_bytes", 5),
    ):
        ((_, of, seen, *_),) = families[name].samples
        assert (of, seen) == (labels, value)
    node.load = msgspec.structs.replace(node.load, num_window_pages=8, num_available_window_pages=2)
    (usage,) = [
        line for line in node.get("/metrics")[1].splitlines() if line.startswith("sglang:token_usage{")
    ]
    assert usage.endswith(" 0.75"), "window pages are shorter"
    assert families["process_resident_memory_bytes"].samples[0].value > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/generate", 404), ("POST", "/live", 405), ("DELETE", "/metrics", 405)],
)
def test_what_is_not_there(node: Node, method: str, path: str, status: int) -> None:
    assert node.get(path, method, b"x" * 100_000 if method == "POST" else None)[0] == status


def test_head_has_no_body(node: Node) -> None:
    head = node.answer_to(b"HEAD /live HTTP/1.1\r\nHost: a\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "first_line"),
    [
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"GET /live HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (
            b"GET /live HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2 * MAX_HEADER_BYTES,
            b"HTTP/1.1 431 Request Header Fields Too Large",
        ),
        (b"GET /live HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /live HTTP/1.1\r\nHost: a\r\n\r\nGET /ready HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /li", b"HTTP/1.1 400 Bad Request"),
        (b"", b""),
    ],
    ids=["TLS", "no Host", "too large", "HTTP/1.0", "pipelined", "half", "nothing"],
)
def test_bytes(node: Node, data: bytes, first_line: bytes) -> None:
    assert node.answer_to(data).partition(b"\r\n")[0] == first_line
    assert node.get("/live")[0] == 200


def test_clients_that_say_nothing_keep_no_probe_out(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as exits:
        oldest = exits.enter_context(node.connect(b"GET /"))
        for _ in range(2 * MAX_CONNECTIONS):
            exits.enter_context(node.connect(b"GET /"))
        assert node.get("/live")[0] == 200
        with contextlib.suppress(ConnectionResetError):
            assert oldest.recv(100) == b""
    assert not [record for record in caplog.records if record.name == "asyncio"], "strangers fill no log"


PROBE = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"


@contextlib.contextmanager
def standing_still(node: Node, num_clients: int, data: bytes) -> Iterator[list[socket.socket]]:
    """The port's thread is in the middle of an answer while so many clients come with `data`; then it goes on."""
    looking, goes_on = threading.Event(), threading.Event()

    def slow_load() -> Load:
        looking.set()
        assert goes_on.wait(PATIENCE_S)
        return node.load

    node.status.serves(dataclasses.replace(node.in_role, load=slow_load))
    with contextlib.ExitStack() as exits:
        exits.enter_context(node.connect(PROBE))
        assert looking.wait(PATIENCE_S)
        clients = [exits.enter_context(node.connect(data)) for _ in range(num_clients)]
        goes_on.set()
        yield clients


def test_a_burst_that_comes_during_an_answer_is_bounded_too(node: Node) -> None:
    """The loop meets all of these connections in one turn, before an exchange that it has cancelled can end."""
    before = len(os.listdir("/proc/self/fd"))
    with standing_still(node, 90, b"GET /") as clients:
        hung_up = select.poll()
        for client in clients:
            hung_up.register(client, select.POLLRDHUP)
        until(lambda: len(hung_up.poll(0)) >= len(clients) - MAX_CONNECTIONS, "the oldest are closed")
    until(lambda: len(os.listdir("/proc/self/fd")) == before, "all are closed")


def test_a_burst_waits_and_each_of_it_is_answered(node: Node) -> None:
    """No connection is lost while the port's thread has no turn, and none is closed unread when it has one."""
    with standing_still(node, 6 * MAX_CONNECTIONS, PROBE) as clients:
        assert {client.recv(15) for client in clients} == {b"HTTP/1.1 200 OK"}


def test_a_client_that_is_slow_is_closed() -> None:
    with Node().listening(exchange_s=0.1) as node:
        for data in (b"GET /live HTTP/1.1\r\n", b""):
            with node.connect(data) as client, contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""


def test_nothing_is_left_after_the_end() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with Node().listening() as node, node.connect(b"GET /"), node.connect():
        assert node.get("/live")[0] == 200
    until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)


def test_a_port_in_use_is_refused_by_name() -> None:
    with Node().listening() as node, pytest.raises(ConfigError, match=rf"--http-port {node.port}: .*in use"):
        NodeHttp(HOST, node.port, node.status).__enter__()
    with pytest.raises(ConfigError, match=r"--http-host nowhere\.invalid"):
        NodeHttp("nowhere.invalid", 0, node.status).__enter__()
