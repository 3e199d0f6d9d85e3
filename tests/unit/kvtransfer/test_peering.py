"""Which decode nodes are dialled, and when again, over real loopback sockets."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from shared.kvtransfer.lending import LINK_KEPT_S, Lending
from shared.kvtransfer.peering import (
    MAX_UNNAMED_PEERS,
    REDIAL_S,
    UNNAMED_IDLE_S,
    Peering,
)
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import Lend, NodeRef, ReqKey
from shared.protocol.transfer_messages import LinkOpen, ReceiverToSender
from tests.patience import PATIENCE_S, until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Sender:
    """What a KVSender is told of connections."""

    def __init__(self) -> None:
        self.connected: queue.Queue[str] = queue.Queue()
        self.disconnected: queue.Queue[tuple[str, str]] = queue.Queue()
        self.used: set[str] = set()
        self.left: list[str] = []

    def is_used_by(self, peer: str) -> bool:
        return peer in self.used

    def leave(self, peer: str, reason: str) -> None:
        self.left.append(peer)

    def on_connected(self, peer: str) -> None:
        self.connected.put(peer)

    def on_disconnected(self, peer: str, reason: str) -> None:
        self.disconnected.put((peer, reason))

    def on_message(self, peer: str, message: ReceiverToSender) -> None:
        raise AssertionError("decode nodes say nothing here")


class Prefill:
    def __init__(self) -> None:
        self.control = ControlThread()
        self.control.start()
        self.clock, self.sender = Clock(), Sender()
        node = NodeRef("p0", "p0#1", "tcp://127.0.0.1:7100")
        self.peering = Peering(node, self.control, self.sender, self.clock)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.peering.redial()

    def nothing_happens(self) -> bool:
        try:
            self.sender.disconnected.get(timeout=0.2)
        except queue.Empty:
            return self.sender.connected.empty()
        return False


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.control.close()


@pytest.fixture
def decode() -> Iterator[NodeRef]:
    """A decode node that listens, and says nothing."""
    control = ControlThread()
    port = control.bind("127.0.0.1", 0)
    control.start()
    control.admit({"sender": Handlers(None, lambda peer, message: None)})  # type: ignore[arg-type]
    yield NodeRef("d0", "d0#1", f"tcp://127.0.0.1:{port}")
    control.close()


@pytest.fixture
def silent() -> Iterator[list[NodeRef]]:
    """Many nodes that answer no dial."""
    control = ControlThread()
    address = f"tcp://127.0.0.1:{control.bind('127.0.0.1', 0)}"
    yield [NodeRef(f"d{i}", f"d{i}#1", address) for i in range(40)]
    control.close()


def dead_node(incarnation: str) -> NodeRef:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return NodeRef(incarnation, incarnation, f"tcp://127.0.0.1:{server.getsockname()[1]}")


def test_a_node_that_could_not_be_reached_is_dialled_again(prefill: Prefill) -> None:
    control = ControlThread()
    try:
        port = control.bind("127.0.0.1", 0)
        node = NodeRef("d0", "d0#1", f"tcp://127.0.0.1:{port}")
        control.close()
        prefill.peering.set_peers("router", [node])
        assert prefill.sender.disconnected.get(timeout=PATIENCE_S) == ("d0#1", "connection refused")
        assert prefill.peering.unreachable == {"d0#1": "connection refused"}
        prefill.pass_time(REDIAL_S / 2)
        prefill.peering.set_peers("router", [node])  # which does not shorten the pause
        assert prefill.nothing_happens()
        control = ControlThread()
        control.bind("127.0.0.1", port)
        control.start()
        prefill.pass_time(REDIAL_S / 2)
        assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
        assert prefill.peering.unreachable == {}
    finally:
        control.close()


def test_a_node_that_a_router_names_no_longer_is_not_dialled_again(prefill: Prefill, decode: NodeRef) -> None:
    dead = dead_node("d1#1")
    prefill.peering.set_peers("router", [decode, dead])
    assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
    assert prefill.sender.disconnected.get(timeout=PATIENCE_S)[0] == "d1#1"
    prefill.peering.set_peers("router", [decode])
    prefill.pass_time(REDIAL_S)
    assert prefill.nothing_happens()
    assert set(prefill.peering._peers) == {"d0#1"}


def test_a_node_that_was_started_again_is_dialled_by_its_new_name_alone(
    prefill: Prefill, decode: NodeRef
) -> None:
    """A router that has died still names the old one, whose connection takes the place of the new one's."""
    old = NodeRef("d0", "d0#0", decode.address)
    prefill.peering.set_peers("living", [decode])
    assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
    prefill.peering.set_peers("dead", [old])
    assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#0"
    prefill.peering._on_message("d0#0", LinkOpen("link", decode, b"", "shm"))
    gone = [prefill.sender.disconnected.get(timeout=PATIENCE_S)[0] for _ in range(2)]
    assert gone == ["d0#0", "d0#1"]
    until(lambda: not prefill.control._dialled)
    prefill.pass_time(REDIAL_S)
    assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
    prefill.pass_time(REDIAL_S)
    assert prefill.nothing_happens()
    assert set(prefill.peering._peers) == {"d0#1"}


def test_a_node_that_was_started_again_and_that_no_router_names_is_not_dialled(
    prefill: Prefill, decode: NodeRef
) -> None:
    prefill.peering.set_peers("dead", [NodeRef("d0", "d0#0", decode.address)])
    assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#0"
    prefill.peering._on_message("d0#0", LinkOpen("link", decode, b"", "shm"))
    assert prefill.sender.disconnected.get(timeout=PATIENCE_S)[0] == "d0#0"
    prefill.pass_time(REDIAL_S)
    assert prefill.nothing_happens()
    assert not prefill.peering._peers and not prefill.control._dialled


def test_each_router_names_nodes_of_its_own(prefill: Prefill) -> None:
    dead = dead_node("d1#1")
    prefill.peering.set_peers("one", [dead])
    prefill.peering.set_peers("two", [dead])
    assert prefill.sender.disconnected.get(timeout=PATIENCE_S)[0] == "d1#1"
    prefill.peering.set_peers("one", [])
    prefill.pass_time(REDIAL_S)
    assert prefill.sender.disconnected.get(timeout=PATIENCE_S)[0] == "d1#1"
    prefill.peering.set_peers("two", [])
    prefill.pass_time(REDIAL_S)
    assert prefill.nothing_happens()
    assert not prefill.peering._peers and not prefill.peering._named


def test_a_node_that_only_a_request_names_is_forgotten_when_it_cannot_be_reached(prefill: Prefill) -> None:
    dead = dead_node("d1#1")
    for _ in range(2):
        prefill.peering.ensure(dead)
        assert prefill.sender.disconnected.get(timeout=PATIENCE_S)[0] == "d1#1"
        assert not prefill.peering._peers


def test_a_connected_node_is_not_dialled_again(prefill: Prefill, decode: NodeRef) -> None:
    prefill.peering.set_peers("router", [decode])
    assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
    prefill.peering.set_peers("router", [decode])
    prefill.pass_time(REDIAL_S)
    prefill.peering.ensure(decode)
    assert prefill.nothing_happens()


class TestNodesThatNoRouterNames:
    """Targets of moves: connected when first needed, and only as long as they are."""

    def test_one_that_is_not_used_is_left_and_then_hung_up_on(
        self, prefill: Prefill, decode: NodeRef
    ) -> None:
        for _ in range(2):
            prefill.peering.ensure(decode)
            assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
            prefill.pass_time(UNNAMED_IDLE_S / 2)
            assert prefill.sender.left == []
            prefill.pass_time(UNNAMED_IDLE_S / 2)
            assert prefill.sender.left == ["d0#1"]
            prefill.pass_time(0.5)
            assert not prefill.peering._peers
            prefill.sender.left.clear()
        assert prefill.sender.disconnected.empty()

    def test_one_that_is_used_stays(self, prefill: Prefill, decode: NodeRef) -> None:
        prefill.peering.ensure(decode)
        prefill.sender.used.add("d0#1")
        prefill.pass_time(UNNAMED_IDLE_S)
        prefill.sender.used.clear()
        prefill.pass_time(UNNAMED_IDLE_S / 2)
        prefill.peering.ensure(decode)
        prefill.pass_time(UNNAMED_IDLE_S / 2)
        assert prefill.sender.left == []

    def test_one_that_a_router_names_stays(self, prefill: Prefill, decode: NodeRef) -> None:
        prefill.peering.set_peers("router", [decode])
        prefill.pass_time(UNNAMED_IDLE_S)
        assert prefill.sender.left == []

    def test_one_that_is_needed_while_this_node_leaves_it_is_dialled_anew(
        self, prefill: Prefill, decode: NodeRef
    ) -> None:
        prefill.peering.ensure(decode)
        assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
        prefill.pass_time(UNNAMED_IDLE_S)
        assert prefill.sender.left == ["d0#1"]
        prefill.peering.ensure(decode)
        assert prefill.sender.connected.get(timeout=PATIENCE_S) == "d0#1"
        prefill.pass_time(0.5)
        assert set(prefill.peering._peers) == {"d0#1"}

    def test_the_one_used_longest_ago_makes_room(self, prefill: Prefill, silent: list[NodeRef]) -> None:
        *first, late, later = silent[: MAX_UNNAMED_PEERS + 2]
        for node in first:
            prefill.peering.ensure(node)
            prefill.clock.now += 0.1
        prefill.sender.used.add("d0#1")
        prefill.peering.ensure(first[1])
        prefill.clock.now += 0.1
        for node in (late, later):
            prefill.peering.ensure(node)
        assert prefill.sender.left == ["d2#1", "d3#1"]
        prefill.pass_time(0.5)
        assert len(prefill.peering._peers) == MAX_UNNAMED_PEERS

    def test_many_borrowers_do_not_close_the_links_of_each_other(
        self, prefill: Prefill, silent: list[NodeRef]
    ) -> None:
        """40 whose turns come in a circle: none would ever find the link that was built for it."""
        lending = Lending(None, prefill.sender, prefill.peering, prefill.clock)  # type: ignore[arg-type]
        first = {node.incarnation for node in silent[:MAX_UNNAMED_PEERS]}
        for _ in range(3):
            for node in silent:
                lending.start(Lend(ReqKey("router", "link"), node, None))
                prefill.pass_time(LINK_KEPT_S / len(silent) / 2)
        assert prefill.sender.left == [] and set(prefill.peering._peers) == first
        prefill.pass_time(LINK_KEPT_S)
        for node in (silent[0], silent[-1]):
            lending.start(Lend(ReqKey("router", "link"), node, None))
        assert prefill.sender.left == ["d1#1"], "it had not asked for long"
