"""A node that was given --router tells it how loading goes, and asks to be dialled, over real sockets."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shared.errors import ConfigError
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.join_announcer import DEFAULT_CONTROL_PORT, JoinAnnouncer, control_address
from shared.protocol.messages import Announcement, Join, LoadFailed, Loading, NodeRef, Role
from tests.patience import PATIENCE_S

NODE = NodeRef("d0", "d0#1", "tcp://127.0.0.1:7200")


class ControlPort:
    """A router's control port."""

    def __init__(self, port: int = 0) -> None:
        self.heard: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.control = ControlThread()
        self.port = self.control.bind("127.0.0.1", port)
        self.control.start()
        self.control.admit(
            {
                "node": Handlers(
                    msgspec.msgpack.Decoder(Announcement), lambda peer, m: self.heard.put((peer, m))
                )
            }
        )


@pytest.fixture
def control() -> Iterator[ControlThread]:
    control = ControlThread()
    control.start()
    yield control
    control.close()


@pytest.mark.parametrize(
    ("router", "address"),
    [("host0", f"tcp://host0:{DEFAULT_CONTROL_PORT}"), ("10.0.0.7:9001", "tcp://10.0.0.7:9001")],
)
def test_the_port_has_a_default(router: str, address: str) -> None:
    assert control_address(router) == address


@pytest.mark.parametrize("router", ["", ":8001", "host:", "host:port", "host:80:90"])
def test_a_malformed_router_is_refused_with_its_flag(router: str) -> None:
    with pytest.raises(ConfigError, match=f"--router {router}: expected HOST or HOST:PORT"):
        control_address(router)


def test_progress_then_the_request_to_be_dialled(control: ControlThread) -> None:
    ports = [ControlPort(), ControlPort()]
    announcer = JoinAnnouncer(control, NODE, Role.DECODE, tuple(f"127.0.0.1:{port.port}" for port in ports))
    announcer.loading("loading weights", 0.5)
    announcer.start()
    try:
        for port in ports:
            assert port.heard.get(timeout=PATIENCE_S) == (
                "d0#1",
                Loading("d0", Role.DECODE, "loading weights", 0.5),
            )
            assert port.heard.get(timeout=PATIENCE_S) == ("d0#1", Join(NODE, Role.DECODE))
    finally:
        announcer.stop()
        for port in ports:
            port.control.close()


def test_a_node_that_loads_says_so_again_and_again(control: ControlThread) -> None:
    port = ControlPort()
    announcer = JoinAnnouncer(control, NODE, Role.DECODE, (f"127.0.0.1:{port.port}",), interval_s=0.05)
    announcer.loading("loading weights", 0.5)
    try:
        for _ in range(3):
            said = port.heard.get(timeout=PATIENCE_S)[1]
            assert said == Loading("d0", Role.DECODE, "loading weights", 0.5)
    finally:
        announcer.stop()
        port.control.close()


def test_a_restarted_router_is_asked_again(control: ControlThread) -> None:
    port = ControlPort()
    announcer = JoinAnnouncer(control, NODE, Role.DECODE, (f"127.0.0.1:{port.port}",))
    announcer.start()
    try:
        assert port.heard.get(timeout=PATIENCE_S)[1] == Join(NODE, Role.DECODE)
        port.control.close()
        port = ControlPort(port.port)
        assert port.heard.get(timeout=PATIENCE_S)[1] == Join(NODE, Role.DECODE)
    finally:
        announcer.stop()
        port.control.close()


def test_who_hangs_up_is_named_and_not_dialled_again_and_again(
    control: ControlThread, caplog: pytest.LogCaptureFixture
) -> None:
    """A router with another fleet key closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(PATIENCE_S)
        router = f"127.0.0.1:{stranger.getsockname()[1]}"
        announcer = JoinAnnouncer(control, NODE, Role.DECODE, (router,), interval_s=3600)
        for _ in range(2):
            stranger.accept()[0].close()
            stranger.settimeout(0.5)
            with pytest.raises(TimeoutError):
                stranger.accept()
            stranger.settimeout(PATIENCE_S)
            announcer.loading("loading weights", 0.5)
        stranger.accept()[0].close()
        announcer.stop()
    assert sum("router_unreachable" in record.getMessage() for record in caplog.records) == 1
    assert "--fleet-key" in caplog.text


def test_a_node_that_could_not_start_says_why(control: ControlThread) -> None:
    port = ControlPort()
    announcer = JoinAnnouncer(control, NODE, Role.DECODE, (f"127.0.0.1:{port.port}",))
    try:
        announcer.say(LoadFailed("d0", Role.DECODE, "no such folder"))
        assert port.heard.get(timeout=PATIENCE_S)[1] == LoadFailed("d0", Role.DECODE, "no such folder")
    finally:
        announcer.stop()
        port.control.close()


def test_without_routers_nothing_runs(control: ControlThread) -> None:
    announcer = JoinAnnouncer(control, NODE, Role.DECODE, ())
    announcer.start()
    announcer.loading("loading weights", 1.0)
    announcer.stop()
