"""Which decode nodes are dialled, and when again. What becomes of a dial is the test's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shared.kvtransfer.lending import LINK_KEPT_S, Lending
from shared.kvtransfer.peering import (
    MAX_UNNAMED_PEERS,
    REDIAL_S,
    UNNAMED_IDLE_S,
    Peering,
)
from shared.protocol.messages import Lend, NodeRef, ReqKey
from shared.protocol.transfer_messages import LinkOpen, ReceiverToSender


class Control:
    """The connections of a ControlThread."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.hung_up: list[str] = []
        self._outcomes: dict[str, tuple[Callable[[str], None], Callable[[str, str], None]]] = {}

    def dial(
        self,
        peer: str,
        address: str,
        identity: str,
        handlers: Any,
        on_connected: Callable[[str], None],
        on_disconnected: Callable[[str, str], None],
    ) -> None:
        assert (address, identity) == (address_of(peer), "sender|p0#1")
        self.dialled.append(peer)
        self._outcomes[peer] = on_connected, on_disconnected

    def hang_up(self, peer: str) -> None:
        self.hung_up.append(peer)

    def connects(self, peer: str) -> None:
        self._outcomes[peer][0](peer)

    def refuses(self, peer: str) -> None:
        self._outcomes[peer][1](peer, "connection refused")


class Sender:
    """What a KVSender is told of connections."""

    def __init__(self) -> None:
        self.connected: list[str] = []
        self.disconnected: list[str] = []
        self.used: set[str] = set()
        self.left: list[str] = []

    def is_used_by(self, peer: str) -> bool:
        return peer in self.used

    def leave(self, peer: str, reason: str) -> None:
        self.left.append(peer)

    def on_connected(self, peer: str) -> None:
        self.connected.append(peer)

    def on_disconnected(self, peer: str, reason: str) -> None:
        self.disconnected.append(peer)

    def on_message(self, peer: str, message: ReceiverToSender) -> None:
        raise AssertionError("decode nodes say nothing here")


class Prefill:
    """A prefill node under a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.control, self.sender = Control(), Sender()
        node = NodeRef("p0", "p0#1", "tcp://p0:7100")
        self.peering = Peering(node, self.control, self.sender, lambda: self.now)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.peering.redial()

    def dials(self) -> list[str]:
        """Those since the last call."""
        dialled, self.control.dialled = self.control.dialled, []
        return dialled

    def answered_as(self, peer: str, now: NodeRef) -> None:
        """A node that was dialled as `peer` says that it is another one."""
        self.peering._on_message(peer, LinkOpen("link", now, b"", "shm"))

    @property
    def peers(self) -> set[str]:
        return set(self.peering._peers)


def address_of(peer: str) -> str:
    return f"tcp://{peer.partition('#')[0]}:7200"


def node(incarnation: str) -> NodeRef:
    return NodeRef(incarnation.partition("#")[0], incarnation, address_of(incarnation))


D0, D0_BEFORE, D1 = node("d0#1"), node("d0#0"), node("d1#1")


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_a_node_that_could_not_be_reached_is_dialled_again(prefill: Prefill) -> None:
    prefill.peering.set_peers("router", [D0])
    assert prefill.dials() == ["d0#1"]
    prefill.control.refuses("d0#1")
    assert prefill.sender.disconnected == ["d0#1"]
    assert prefill.peering.unreachable == {"d0#1": "connection refused"}
    prefill.pass_time(REDIAL_S / 2)
    prefill.peering.set_peers("router", [D0])  # which does not shorten the pause
    assert prefill.dials() == []
    prefill.pass_time(REDIAL_S / 2)
    assert prefill.dials() == ["d0#1"]
    prefill.control.connects("d0#1")
    assert prefill.sender.connected == ["d0#1"] and prefill.peering.unreachable == {}


def test_a_node_that_a_router_names_no_longer_is_not_dialled_again(prefill: Prefill) -> None:
    prefill.peering.set_peers("router", [D0, D1])
    prefill.control.connects("d0#1")
    prefill.control.refuses("d1#1")
    prefill.peering.set_peers("router", [D0])
    prefill.pass_time(REDIAL_S)
    assert prefill.dials() == ["d0#1", "d1#1"] and prefill.peers == {"d0#1"}


def test_a_node_that_was_started_again_is_dialled_by_its_new_name_alone(prefill: Prefill) -> None:
    """A router that has died still names the old one, whose connection takes the place of the new one's."""
    prefill.peering.set_peers("living", [D0])
    prefill.peering.set_peers("dead", [D0_BEFORE])
    for peer in prefill.dials():
        prefill.control.connects(peer)
    prefill.answered_as("d0#0", D0)
    assert prefill.sender.disconnected == prefill.control.hung_up == ["d0#0", "d0#1"]
    prefill.pass_time(REDIAL_S)
    assert prefill.dials() == ["d0#1"]
    prefill.control.connects("d0#1")
    prefill.pass_time(REDIAL_S)
    assert prefill.dials() == [] and prefill.peers == {"d0#1"}


def test_the_old_name_of_a_node_is_not_dialled_again_once_the_new_one_is_known(prefill: Prefill) -> None:
    """It would take the place of the connection to the new process."""
    prefill.peering.set_peers("dead", [D0_BEFORE])
    prefill.control.refuses("d0#0")
    prefill.peering.set_peers("living", [D0])
    prefill.control.connects("d0#1")
    prefill.pass_time(REDIAL_S)
    assert prefill.dials() == ["d0#0", "d0#1"] and prefill.peers == {"d0#1"}


def test_a_node_that_was_started_again_and_that_no_router_names_is_not_dialled(prefill: Prefill) -> None:
    prefill.peering.set_peers("dead", [D0_BEFORE])
    prefill.control.connects("d0#0")
    prefill.answered_as("d0#0", D0)
    assert prefill.sender.disconnected == prefill.control.hung_up == ["d0#0"]
    prefill.pass_time(REDIAL_S)
    assert prefill.dials() == ["d0#0"] and not prefill.peers


def test_each_router_names_nodes_of_its_own(prefill: Prefill) -> None:
    for router in ("one", "two"):
        prefill.peering.set_peers(router, [D1])
    for router, dialled in (("one", ["d1#1"]), ("two", [])):
        assert prefill.dials() == ["d1#1"]
        prefill.control.refuses("d1#1")
        prefill.peering.set_peers(router, [])
        prefill.pass_time(REDIAL_S)
        assert prefill.control.dialled == dialled
    assert not prefill.peers and not prefill.peering._named


def test_a_node_that_only_a_request_names_is_forgotten_when_it_cannot_be_reached(prefill: Prefill) -> None:
    for _ in range(2):
        prefill.peering.ensure(D1)
        assert prefill.dials() == ["d1#1"]
        prefill.control.refuses("d1#1")
        assert not prefill.peers


def test_a_connected_node_is_not_dialled_again(prefill: Prefill) -> None:
    prefill.peering.set_peers("router", [D0])
    prefill.control.connects("d0#1")
    prefill.peering.set_peers("router", [D0])
    prefill.pass_time(REDIAL_S)
    prefill.peering.ensure(D0)
    assert prefill.dials() == ["d0#1"]


class TestNodesThatNoRouterNames:
    """Targets of moves: connected when first needed, and only as long as they are."""

    def test_one_that_is_not_used_is_left_and_then_hung_up_on(self, prefill: Prefill) -> None:
        for number in (1, 2):
            prefill.peering.ensure(D0)
            prefill.control.connects("d0#1")
            for left in ([], ["d0#1"]):
                prefill.pass_time(UNNAMED_IDLE_S / 2)
                assert prefill.sender.left == left
            prefill.pass_time(0.5)
            assert not prefill.peers and prefill.control.hung_up == ["d0#1"] * number
            prefill.sender.left.clear()
        assert not prefill.sender.disconnected

    def test_one_that_is_used_stays(self, prefill: Prefill) -> None:
        prefill.peering.ensure(D0)
        prefill.sender.used.add("d0#1")
        prefill.pass_time(UNNAMED_IDLE_S)
        prefill.sender.used.clear()
        prefill.pass_time(UNNAMED_IDLE_S / 2)
        prefill.peering.ensure(D0)
        prefill.pass_time(UNNAMED_IDLE_S / 2)
        assert prefill.sender.left == []

    def test_one_that_a_router_names_stays(self, prefill: Prefill) -> None:
        prefill.peering.set_peers("router", [D0])
        prefill.pass_time(UNNAMED_IDLE_S)
        assert prefill.sender.left == []

    def test_one_that_is_needed_while_this_node_leaves_it_is_dialled_anew(self, prefill: Prefill) -> None:
        prefill.peering.ensure(D0)
        prefill.control.connects("d0#1")
        prefill.pass_time(UNNAMED_IDLE_S)
        assert prefill.sender.left == ["d0#1"]
        prefill.peering.ensure(D0)
        assert prefill.dials() == ["d0#1"] * 2
        prefill.pass_time(0.5)
        assert prefill.peers == {"d0#1"} and not prefill.control.hung_up

    def test_the_one_used_longest_ago_makes_room(self, prefill: Prefill) -> None:
        *first, late, later = (node(f"d{i}#1") for i in range(MAX_UNNAMED_PEERS + 2))
        for one in first:
            prefill.peering.ensure(one)
            prefill.now += 0.1
        prefill.sender.used.add("d0#1")
        prefill.peering.ensure(first[1])
        prefill.now += 0.1
        for one in (late, later):
            prefill.peering.ensure(one)
        assert prefill.sender.left == ["d2#1", "d3#1"]
        prefill.pass_time(0.5)
        assert len(prefill.peers) == MAX_UNNAMED_PEERS

    def test_many_borrowers_do_not_close_the_links_of_each_other(self, prefill: Prefill) -> None:
        """40 whose turns come in a circle: none would ever find the link that was built for it."""
        nodes = [node(f"d{i}#1") for i in range(40)]
        lending = Lending(None, prefill.sender, prefill.peering, lambda: prefill.now)  # type: ignore[arg-type]
        for _ in range(3):
            for one in nodes:
                lending.start(Lend(ReqKey("router", "link"), one, None))
                prefill.pass_time(LINK_KEPT_S / len(nodes) / 2)
        assert prefill.sender.left == []
        assert prefill.peers == {one.incarnation for one in nodes[:MAX_UNNAMED_PEERS]}
        prefill.pass_time(LINK_KEPT_S)
        for one in (nodes[0], nodes[-1]):
            lending.start(Lend(ReqKey("router", "link"), one, None))
        assert prefill.sender.left == ["d1#1"], "it had not asked for long"
