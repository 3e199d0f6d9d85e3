"""What a node passes on between its routers, and to whom."""

from __future__ import annotations

import pytest

from shared.protocol.messages import AbortedReqs, AddedNode, Draining, Relay, RemovedNode, Role, Struct
from shared.protocol.router_relay import RouterRelay

ADDED = AddedNode(Role.DECODE, "tcp://d1:7200", "d1#1")


class Rig:
    """Routers a, b and c, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[str, Struct]] = []
        self.relay = RouterRelay(self, lambda: ["a", "b", "c"], lambda: self.now)

    def send(self, to: str, message: Struct) -> None:
        self.sent.append((to, message))

    def take(self) -> list[tuple[str, Struct]]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_removal_comes_too_late_for_a_node_that_takes_its_role(rig: Rig) -> None:
    rig.relay.drain(60.0, Role.PREFILL)
    for router in ("a", "b", "c"):
        rig.relay.let_go(router)
    rig.take()
    assert rig.relay.take_role() is Role.PREFILL
    rig.relay.drain(10.0)
    assert rig.take() == [] and not rig.relay.is_leaving
    rig.relay.drain(10.0, stops=True)
    assert rig.take() == [(router, Draining(10.0, stops=True)) for router in ("a", "b", "c")]


def test_news_goes_to_all_others_and_to_nobody_in_anothers_name(rig: Rig) -> None:
    news = Relay("a", 1, AbortedReqs("x"))
    rig.relay.relay("a", news)
    assert rig.take() == [("b", news), ("c", news)]
    rig.relay.relay("b", news)
    assert rig.take() == []


def test_a_router_that_comes_later_hears_what_still_holds(rig: Rig) -> None:
    added = Relay("a", 1, ADDED)
    rig.relay.relay("a", added)
    rig.relay.relay("a", Relay("a", 2, AbortedReqs("x")))
    rig.take()
    rig.relay.greet("d", resume=False)
    assert rig.take() == [("d", added)]
    rig.relay.relay("b", Relay("b", 1, RemovedNode(ADDED.address, ADDED.incarnation, 5.0)))
    rig.take()
    rig.relay.greet("d", resume=False)
    assert rig.take() == []


def test_a_drain_is_told_to_all_once_and_only_ever_shortened(rig: Rig) -> None:
    rig.relay.drain(60.0)
    assert rig.take() == [(router, Draining(60.0)) for router in ("a", "b", "c")]
    rig.now += 10
    rig.relay.drain(60.0)  # as every router answers that hears of it
    assert rig.take() == []
    rig.relay.greet("d", resume=False)
    assert rig.take() == [("d", Draining(50.0))]
    rig.relay.drain(5.0)
    assert rig.take()[0] == ("a", Draining(5.0))
    rig.now += 60
    rig.relay.greet("d", resume=False)
    assert rig.take() == [("d", Draining(0.0))]
    rig.relay.greet("d", resume=True)
    rig.relay.greet("e", resume=False)
    assert rig.take() == []


def test_a_process_that_stops_says_so_to_all_whatever_was_said_before(rig: Rig) -> None:
    rig.relay.drain(5.0)
    rig.take()
    rig.relay.drain(60.0, stops=True)
    assert rig.take() == [(router, Draining(60.0, stops=True)) for router in ("a", "b", "c")]
    rig.relay.greet("d", resume=False)
    assert rig.take() == [("d", Draining(60.0, stops=True))]


def test_a_process_that_stops_cannot_be_kept(rig: Rig) -> None:
    rig.relay.drain(60.0, stops=True)
    rig.relay.drain(60.0)  # an operator removes the node too
    rig.take()
    rig.relay.greet("d", resume=True)
    assert rig.take() == [("d", Draining(60.0, stops=True))] and rig.relay.is_draining


def test_a_node_takes_another_role_when_each_router_has_let_it_go(rig: Rig) -> None:
    rig.relay.drain(60.0, Role.PREFILL)
    assert rig.take() == [(router, Draining(60.0, role=Role.PREFILL)) for router in ("a", "b", "c")]
    rig.now += 10
    for router in ("a", "b", "c"):
        assert rig.relay.next_role is None
        rig.relay.let_go(router)
    assert rig.relay.next_role is Role.PREFILL
    rig.relay.greet("b", resume=True)  # it connects anew, and may have work until it hears of the drain
    assert rig.take() == [("b", Draining(50.0, role=Role.PREFILL))]
    assert rig.relay.next_role is None


def test_a_process_that_stops_takes_no_other_role(rig: Rig) -> None:
    rig.relay.drain(60.0, Role.PREFILL)
    for router in ("a", "b", "c"):
        rig.relay.let_go(router)
    rig.take()
    rig.relay.drain(30.0, stops=True)
    assert rig.take() == [(router, Draining(30.0, stops=True)) for router in ("a", "b", "c")]
    assert rig.relay.next_role is None


def test_a_removal_holds_against_another_role(rig: Rig) -> None:
    rig.relay.drain(60.0, Role.PREFILL)
    for router in ("a", "b", "c"):
        rig.relay.let_go(router)
    rig.take()
    rig.relay.drain(100.0)
    assert rig.take() == [(router, Draining(100.0)) for router in ("a", "b", "c")]
    assert rig.relay.next_role is None and rig.relay.is_leaving
    rig.relay.greet("a", resume=True)
    rig.take()
    rig.relay.drain(60.0, Role.PREFILL)
    assert rig.relay.next_role is None, "what routers said of an earlier change does not count"
