"""Strangers on gloo's port: port scanners, health checks, attackers."""

from __future__ import annotations

import gc
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import Work

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.link import RECEIVER
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.states import Received
from shared.kvtransfer.transports.gloo import GlooLinkFactory, GlooOp
from shared.kvtransfer.transports.listener_filter import drop_connections
from tests.patience import PATIENCE_S, until
from tests.unit.kvtransfer.link_pair import LinkPair, key, link_spec, num_descriptors, real

torch.set_num_threads(1)

NUM_STRANGERS = 1000
GREETINGS = (b"", b"x" * 3, b"x" * 8, bytes(64))
"""gloo reads eight bytes of each connection."""


def listening_ports(pid: int | str = "self", *, but: int = 0) -> list[int]:
    """Of one process, by the kernel's tables of sockets, without that of its control socket."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(link.readlink().name)
    tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    listening = "0A"
    ports = [
        int(row[1].split(":")[1], 16) for row in rows if row[3] == listening and f"socket:[{row[9]}]" in own
    ]
    return [port for port in ports if port != but]


class Stranger:
    """Connects without waiting, so that a port that answers nothing costs it no time."""

    def __init__(self, port: int, number: int, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self._socket.connect_ex((host, port))
        try:
            self._socket.send(GREETINGS[number % len(GREETINGS)])
            self.connected = True
        except OSError:
            self.connected = False

    def leave(self) -> None:
        self._socket.close()


def visit(ports: list[int], host: str = "127.0.0.1") -> int:
    """NUM_STRANGERS come and go, spread over the ports. Returns how many came through."""
    assert ports
    num_connected = 0
    for number in range(NUM_STRANGERS):
        stranger = Stranger(ports[number % len(ports)], number, host)
        num_connected += stranger.connected
        stranger.leave()
    return num_connected


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="NO IPV6 HERE"))],
)
def test_a_thousand_strangers_leave_no_descriptor_behind(host: str) -> None:
    pair = LinkPair(replace(real("gloo"), bind_host=host))
    pair.until(pair.linked)
    ports, before = listening_ports(but=pair.receiving.port), num_descriptors()
    assert len(ports) == 2, "each end has a port of its own"
    assert visit(ports, host) == 0
    pair.moves_pages()
    until(lambda: num_descriptors() == before)
    pair.close()


def test_a_listener_that_is_not_of_a_link_still_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert drop_connections([b"elsewhere"]) == 0
        socket.create_connection(listener.getsockname(), timeout=PATIENCE_S).close()
        listener.settimeout(PATIENCE_S)
        listener.accept()[0].close()


def test_strangers_that_come_while_links_are_built_are_gone_with_the_link() -> None:
    before = num_descriptors()
    pair, done, num_connected = LinkPair(real("gloo")), threading.Event(), 0

    def pester() -> None:
        nonlocal num_connected
        while not done.is_set():
            for number, port in enumerate(listening_ports(but=pair.receiving.port)):
                stranger = Stranger(port, number)
                num_connected += stranger.connected
                stranger.leave()

    pesterer = threading.Thread(target=pester)
    pesterer.start()
    for number in range(30):
        pair.until(pair.linked)
        pair.p.on_disconnected("d0", "test")
        pair.p.on_connected("d0")
        pair.until_opened(number + 2)
    pair.until(pair.linked)
    pair.transfer(0, [1, 2], [3, 4])
    pair.until_received(0)
    done.set()
    pesterer.join()
    assert isinstance(pair.received[key(0)], Received)
    print(f"{num_connected} came through while 31 links were built")
    pair.close()
    until(lambda: num_descriptors() <= before)


def test_the_port_of_a_lost_link_closes_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        pair = LinkPair(real("gloo"))
        pair.until(pair.linked)
        pages = list(range(1, 60))
        pair.transfer(0, pages, pages)
        worker = pair.p._peers["d0"].link
        assert worker is not None
        worker.abort_ops()
        pair.until(lambda: key(0) in pair.sent)
        pair.until(pair.linked)
        pair.close()
        until(lambda: not listening_ports())
    finally:
        gc.enable()


def test_an_op_that_cannot_be_started_fails_when_it_is_waited_for() -> None:
    def start() -> Work:
        raise RuntimeError("[/torch/gloo/pair.cc:1] Connection closed")

    op = GlooOp(start, torch.zeros(1))
    with pytest.raises(LinkError, match=r"^Connection closed$"):
        op.wait(block=True)


def test_nothing_listens_before_both_ends_are_there() -> None:
    """A peer that never comes leaves no port open for all the time in which a link may be built."""
    asked, failed = threading.Event(), threading.Event()
    store = LinkStore(lambda name, value: asked.set(), timeout_s=PATIENCE_S)
    factory = GlooLinkFactory(real("gloo"), torch.device("cpu"), DeviceThreads())
    spec = link_spec(RECEIVER, store, factory)

    def build() -> None:
        with pytest.raises(LinkError, match="given up"):
            factory.build(spec, lambda reason: None, block=True)
        failed.set()

    builder = threading.Thread(target=build)
    builder.start()
    assert asked.wait(PATIENCE_S)
    builder.join(0.1)
    assert listening_ports() == []
    store.abort("given up")
    builder.join(PATIENCE_S)
    assert failed.is_set()
