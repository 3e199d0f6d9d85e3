"""A node that was given --router tells it how loading goes, and asks to be dialled, over real sockets."""

from __future__ import annotations

import contextlib
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


LOADING = Loading("d0", Role.DECODE, "loading weights", 0.5)


class ControlPort:
    """A router's control port."""

    def __init__(self, port: int = 0) -> None:
        self._heard: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._control = ControlThread()
        self.port = self._control.bind("127.0.0.1", port)
        self._control.start()
        decoder = msgspec.msgpack.Decoder(Announcement)
        self._control.admit({"node": Handlers(decoder, lambda peer, m: self._heard.put((peer, m)))})
        self.close = self._control.close

    def hears(self) -> Any:
        """The next announcement of the node."""
        peer, message = self._heard.get(timeout=PATIENCE_S)
        assert peer == NODE.incarnation
        return message


@contextlib.contextmanager
def announcing(*ports: int, **options: float) -> Iterator[JoinAnnouncer]:
    """A node that announces itself at these ports."""
    control = ControlThread()
    control.start()
    announcer = JoinAnnouncer(
        control, NODE, Role.DECODE, tuple(f"127.0.0.1:{port}" for port in ports), **options
    )
    try:
        yield announcer
    finally:
        announcer.stop()
        control.close()


@pytest.fixture
def port() -> Iterator[ControlPort]:
    port = ControlPort()
    yield port
    port.close()


@pytest.mark.parametrize(
    ("router", "address"),
    [("host0", f"tcp://host0:{DEFAULT_CONTROL_PORT}"), ("10.0.0.7:9001", "tcp://10.0.0.7:9001")],
)
def test_the_port_has_a_default(router: str, address: str) -> None:
    assert control_address(router) == address


@pytest.mark.parametrize("router", ["", ":8001", "host:", "host:port", "host:80:90"])
def test_a_malformed_router_is_refused_with_its_flag(router: str) -> None:
    with pytest.raises(ConfigError, match=f"--router {router}: "):
        control_address(router)


def test_progress_then_the_request_to_be_dialled(port: ControlPort) -> None:
    other = ControlPort()
    with announcing(port.port, other.port) as announcer:
        announcer.loading("loading weights", 0.5)
        announcer.start()
        for each in (port, other):
            assert [each.hears(), each.hears()] == [LOADING, Join(NODE, Role.DECODE)]
    other.close()


def test_a_node_that_loads_says_so_again_and_again(port: ControlPort) -> None:
    with announcing(port.port, interval_s=0.05) as announcer:
        announcer.loading("loading weights", 0.5)
        assert [port.hears() for _ in range(3)] == [LOADING] * 3


def test_a_restarted_router_is_asked_again(port: ControlPort) -> None:
    with announcing(port.port) as announcer:
        announcer.start()
        assert port.hears() == Join(NODE, Role.DECODE)
        port.close()
        again = ControlPort(port.port)
        assert again.hears() == Join(NODE, Role.DECODE)
    again.close()


def test_who_hangs_up_is_named_and_not_dialled_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """A router with another fleet key closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(PATIENCE_S)
        with announcing(stranger.getsockname()[1], interval_s=3600) as announcer:
            for _ in range(2):
                stranger.accept()[0].close()
                stranger.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    stranger.accept()
                stranger.settimeout(PATIENCE_S)
                announcer.loading("loading weights", 0.5)
            stranger.accept()[0].close()
    assert sum("router_unreachable" in record.getMessage() for record in caplog.records) == 1
    assert "--fleet-key" in caplog.text


def test_a_node_that_could_not_start_says_why(port: ControlPort) -> None:
    failed = LoadFailed("d0", Role.DECODE, "no such folder")
    with announcing(port.port) as announcer:
        announcer.say(failed)
        assert port.hears() == failed


def test_without_routers_nothing_runs() -> None:
    with announcing() as announcer:
        announcer.start()
        announcer.loading("loading weights", 1.0)
