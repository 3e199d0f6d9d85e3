"""The port that gloo listens on, and ops that cannot be started."""

from __future__ import annotations

import gc
import select
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed import Work

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.link import RECEIVER
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.transports.gloo import GlooLinkFactory, GlooOp
from shared.kvtransfer.transports.listener_filter import drop_connections
from tests.patience import PATIENCE_S, until
from tests.unit.kvtransfer.link_pair import LinkPair, key, link_spec, num_descriptors, real

torch.set_num_threads(1)


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


def test_a_thousand_strangers_leave_no_descriptor_behind() -> None:
    """The kernel drops what arrives at the port of a link that is up."""
    pair = LinkPair(real("gloo"))
    pair.until(pair.linked)
    ports, before = listening_ports(but=pair.receiving.port), num_descriptors()
    assert len(ports) == 2, "each end has a port of its own"
    for number in range(1000):
        with socket.socket() as stranger:
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", ports[number % 2]))
            assert select.select([], [stranger], [], 0)[1] == [], "a connection came about"
    pair.moves_pages()
    until(lambda: num_descriptors() == before)
    pair.close()


def test_a_listener_that_is_not_of_a_link_still_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert drop_connections([b"elsewhere"]) == 0
        socket.create_connection(listener.getsockname(), timeout=PATIENCE_S).close()
        listener.settimeout(PATIENCE_S)
        listener.accept()[0].close()


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
