"""Membership over real sockets, with scripted nodes and a name server that the test decides."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq.asyncio

from router.dispatch.node import Loss, Node
from router.nodes.fleet_changes import FleetChanges
from router.nodes.live_node import Timing
from router.nodes.member import Member, MemberState
from router.nodes.membership import MAX_MEMBERS, Membership
from router.nodes.shared_news import SharedNews
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    CacheEvents,
    Cancel,
    Failed,
    Join,
    Leaving,
    Load,
    Loading,
    NodeHello,
    NodeRef,
    ReqKey,
    Role,
    RouterToNode,
    TokenEntry,
    Tokens,
)
from shared.protocol.resolver import Resolver
from shared.protocol.router_port import RouterPort
from tests.patience import eventually
from tests.unit.protocol.conftest import SlowNames
from tests.unit.router.fake_node import LAYOUT, LIMITS, FakeNode

TIMING = Timing(hello_s=1.0, redial_s=0.05, ping_s=0.05, loading_s=0.2)


class Events:
    """Hears what nodes say, and which are lost."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.losses: list[Loss] = []
        self.reasons: list[str] = []

    def _unheard(self, *about: object) -> None:
        raise AssertionError(f"there is one router without a request: {about}")

    hear = on_draining = on_relay = _unheard

    def on_node_alive(self, node: Node) -> None:
        """There are no requests."""

    def on_node_lost(self, node: Node, reason: str, loss: Loss) -> None:
        self.lost.append(node.ref.node_id)
        self.losses.append(loss)
        self.reasons.append(reason)


@contextlib.asynccontextmanager
async def new_membership(
    names: SlowNames | None = None, timing: Timing = TIMING, max_members: int = MAX_MEMBERS
) -> AsyncIterator[tuple[Membership, Events]]:
    context, events = zmq.asyncio.Context(), Events()
    membership = Membership(
        context,
        incarnation="router",
        fleet_key=None,
        timing=timing,
        resolver=Resolver(names) if names else Resolver(),
        max_members=max_members,
    )
    membership.report_to(events, events)
    try:
        yield membership, events
    finally:
        await membership.close()
        context.destroy()


class NoReqs:
    """Of a router without sequences."""

    def num_held(self, node: Node) -> int:
        return 0

    def move_held(self, node: Node) -> None:
        raise AssertionError("it holds nothing")

    def fail_over_held(self, node: Node, reason: str) -> int:
        return 0


def changes_of(membership: Membership, events: Events, **options: float) -> FleetChanges:
    """Of a router without sequences."""
    news = SharedNews(membership.all_live, "router")
    changes = FleetChanges(membership, NoReqs(), news, lambda rid: None, **options)
    membership.report_to(events, changes)
    return changes


def dial(membership: Membership, address: str, role: Role = Role.DECODE, *, pinned: bool = True) -> Member:
    """A member for which there is room."""
    member = membership.dial(address, role, pinned=pinned)
    assert member is not None
    return member


async def dialled(membership: Membership, node: FakeNode) -> Member:
    """Once it is alive."""
    member = dial(membership, node.ref.address, node.role)
    await eventually(lambda: member.state is MemberState.ALIVE)
    return member


async def test_a_name_that_resolves_slowly_costs_no_other_node() -> None:
    names = SlowNames()
    async with FakeNode(Role.DECODE) as node, new_membership(names) as (membership, events):
        late = dial(membership, "tcp://slow.example:7200")
        member = await dialled(membership, node)
        await eventually(lambda: late.state is MemberState.LOST)
        assert late.reason == "slow.example does not resolve: no answer within 1 s"
        assert member.state is MemberState.ALIVE
        assert not events.lost
    names.answers.set()


async def test_live_nodes_are_sorted_when_one_changes_and_not_for_each_request() -> None:
    async with (
        FakeNode(Role.DECODE, "d0") as one,
        FakeNode(Role.DECODE, "d1") as other,
        new_membership() as (membership, _),
    ):

        def live() -> list[str]:
            names = [node.ref.node_id for node in membership.live(Role.DECODE)]
            every = [node.ref.node_id for node in membership.all_live()]
            assert [name for name in every if name in names] == names
            return names

        members = {node.node_id: await dialled(membership, node) for node in (one, other)}
        assert live() == ["d0", "d1"]
        assert membership.live(Role.DECODE) is membership.live(Role.DECODE)
        membership.hold(members["d0"], "for a while")
        assert live() == ["d1"] and len(membership.all_live()) == 2
        membership.keep(members["d0"])
        assert live() == ["d1", "d0"], "it is alive anew"
        await membership.remove(members["d1"])
        assert live() == ["d0"] and not membership.live(Role.PREFILL)


async def test_the_last_lost_node_of_a_role_is_not_forgotten() -> None:
    """Else /health would call a fleet whole that has lost all its prefill nodes."""
    timing = dataclasses.replace(TIMING, forget_s=0.05)
    async with (
        FakeNode(Role.PREFILL, "p0") as one,
        FakeNode(Role.PREFILL, "p1") as other,
        new_membership(timing=timing) as (membership, events),
    ):
        for node in (one, other):
            dial(membership, node.ref.address, Role.PREFILL, pinned=False)
        await eventually(lambda: len(membership.live(Role.PREFILL)) == 2)
        await one.stop()
        await eventually(lambda: len(membership.members) == 1)
        await other.stop()
        await eventually(lambda: events.lost == ["p0", "p1"])
        await asyncio.sleep(4 * (timing.forget_s + timing.redial_s))
        assert membership.expects(Role.PREFILL)


@pytest.mark.parametrize("incarnation", ["a", "another"])
async def test_a_slow_node_answers_an_earlier_hello_too(incarnation: str) -> None:
    """What a node said to the connection before may come over this one too: it knows a router by its name."""
    key = ReqKey("router", "1")
    left = [CacheEvents(7, (1, 2), (3,)), Tokens((TokenEntry(key, 0, (1,)),)), Failed(key, 503, "gone")]
    async with FakeNode(Role.DECODE) as node, new_membership() as (membership, events):
        ref = msgspec.structs.replace(node.ref, incarnation=f"{node.ref.node_id}-{incarnation}")
        node.before_hello = [*left, NodeHello(ref, node.role, node.layout, node.limits, {}, PROTOCOL_VERSION)]
        dial(membership, node.ref.address)
        if incarnation == "a":
            await eventually(lambda: membership.live(Role.DECODE))
            await asyncio.sleep(5 * TIMING.ping_s)
            assert not events.lost and node.identities[1:] == []
        else:
            await eventually(lambda: events.lost)


async def test_a_name_is_looked_up_again_until_it_resolves() -> None:
    names = SlowNames()
    async with FakeNode(Role.DECODE) as node, new_membership(names) as (membership, _):
        names.unknown.add("moved.example")
        address = node.ref.address.replace("127.0.0.1", "moved.example")
        member = dial(membership, address)
        await eventually(lambda: member.state is MemberState.LOST)
        assert member.reason == "moved.example does not resolve: Name or service not known"
        names.unknown.clear()
        await eventually(lambda: member.state is MemberState.ALIVE)


async def test_a_node_that_says_nothing_more_is_not_loading() -> None:
    async with new_membership() as (membership, _):
        membership.on_announcement(Loading("d0", Role.DECODE, "loading weights", 0.5))
        assert [message.node_id for message in membership.loading] == ["d0"]
        why = "no decode node can serve this now: "
        assert membership.why_none(Role.DECODE) == f"{why}d0 is loading (loading weights)"
        assert membership.why_none(Role.PREFILL).endswith("there is none")
        await eventually(lambda: not membership.loading)
        assert membership.why_none(Role.DECODE) == f"{why}there is none"
        membership.on_announcement(Loading("d0", Role.DECODE, "loading weights", 1.0))
        membership.on_announcement(Join(NodeRef("d0", "d0#a", "tcp://gone.invalid:7200"), Role.DECODE))
        assert not membership.loading, "it has joined"


async def test_a_router_that_stops_says_so() -> None:
    async with FakeNode(Role.DECODE) as node:
        async with new_membership() as (membership, _):
            await dialled(membership, node)
        await node.wait_for(Leaving)


@pytest.mark.parametrize(
    ("how", "loss"),
    [
        ("its process ends", Loss.LEFT),
        ("its process fails", Loss.CRASHED),
        ("it says that it leaves", Loss.LEFT),
        ("it says that it crashed", Loss.CRASHED),
        ("its connection is closed without a word", Loss.CRASHED),
    ],
)
async def test_what_the_loss_of_a_node_says_of_its_process(how: str, loss: Loss) -> None:
    async with FakeNode(Role.DECODE) as node, new_membership() as (membership, events):
        await dialled(membership, node)
        if how.startswith("its process"):
            membership.node_exited(node.node_id, Role.DECODE, how, crashed=how.endswith("fails"))
        elif how.startswith("it says"):
            node.send(Leaving(how, crashed=how.endswith("crashed")))
        else:
            await node.stop()
        await eventually(lambda: bool(events.lost))
        assert events.losses == [loss] and (how in events.reasons or how.startswith("its connection"))


async def test_a_process_that_ends_before_its_node_is_known_is_listed_as_lost() -> None:
    async with new_membership() as (membership, _):
        membership.node_exited("decode-0", Role.DECODE, "exited with code 1", crashed=True)
        (member,) = membership.members
        assert (member.node_id, member.state) == ("decode-0", MemberState.LOST)
        assert member.reason == "exited with code 1"


@pytest.mark.parametrize("how", ["silent", "exited"])
async def test_a_connection_that_is_closed_after_a_silence_is_a_crash_only_if_the_process_has_ended(
    how: str,
) -> None:
    timing = Timing(hello_s=1.0, redial_s=0.05, ping_s=60.0, node_timeout_s=0.2)

    async with FakeNode(Role.DECODE) as node, new_membership(timing=timing) as (membership, events):
        member = await dialled(membership, node)
        live = member.node
        assert live is not None
        await eventually(lambda: live.liveness.is_silent(time.monotonic()))
        if how == "exited":
            membership.node_exited(node.node_id, Role.DECODE, "was killed by SIGSEGV", crashed=True)
        else:
            await node.stop()
        await eventually(lambda: bool(events.lost))
        assert events.losses == [Loss.CRASHED if how == "exited" else Loss.BROKEN]
        assert live.link.lost.result() == (member.exited or "connection closed")


async def test_a_node_that_takes_no_messages_has_not_crashed() -> None:
    async with FakeNode(Role.DECODE) as node, new_membership() as (membership, events):
        member = await dialled(membership, node)
        live = member.node
        assert live is not None
        large = Cancel(ReqKey("r" * 4096, "1"))
        while not live.link.lost.done():  # the fake node does not run meanwhile
            live.send(large)
        await eventually(lambda: bool(events.lost))
        assert events.losses == [Loss.BROKEN] and "messages wait to be sent" in live.link.lost.result()


async def test_a_node_that_is_refused_does_not_count_on_the_router() -> None:
    """It would wait for that router when its role changes."""
    async with (
        FakeNode(Role.DECODE) as node,
        FakeNode(Role.DECODE, "other") as other,
        new_membership() as (members, _),
    ):
        other.layout = msgspec.structs.replace(other.layout, fingerprint="another model")
        await dialled(members, node)
        dial(members, other.ref.address)
        await other.wait_for(Leaving)
        assert not node.all(Leaving)


@contextlib.contextmanager
def listening(node_id: str) -> Iterator[tuple[NodeRef, RouterPort]]:
    """A decode node with real sockets and no scheduler."""
    control, turns = ControlThread(), itertools.count()
    ref = NodeRef(node_id, f"{node_id}#1", f"tcp://127.0.0.1:{control.bind('0.0.0.0', 0)}")
    hello = NodeHello(ref, Role.DECODE, LAYOUT, LIMITS, {}, PROTOCOL_VERSION)

    def load() -> Load:
        return Load(progress=next(turns))

    port = RouterPort(control.to_diallers, hello, load, threading.Event(), time.monotonic)
    control.start()
    control.admit({"router": Handlers(msgspec.msgpack.Decoder(RouterToNode), port.on_message)})
    try:
        yield ref, port
    finally:
        control.close()


@pytest.mark.parametrize("host", ["alias.example", "127.0.0.2"])
async def test_a_node_with_two_addresses_keeps_one_connection(host: str) -> None:
    """It answers a router where it was dialled last. That a name is an alias is known before a dial."""
    timing = dataclasses.replace(TIMING, node_timeout_s=0.5, redial_refused_s=0.3)

    with listening("d0") as (ref, port):
        async with new_membership(SlowNames(), timing) as (members, events):
            dial(members, ref.address)
            await eventually(lambda: members.live(Role.DECODE))
            address = ref.address.replace("127.0.0.1", host)
            other = dial(members, address)
            await eventually(lambda: other.state is MemberState.REFUSED)
            assert other.reason == "node_id: d0 is already here, under another address"
            await eventually(lambda: members.live(Role.DECODE))
            await asyncio.sleep(4 * timing.node_timeout_s)
            lost = [] if host == "alias.example" else [f"it was dialled as {address} too"]
            assert events.reasons == lost
            assert members.live(Role.DECODE)
            assert not any(isinstance(heard.message, Leaving) for heard in port.take())


async def test_an_address_that_another_node_has_now_is_dialled() -> None:
    with listening("d0") as (old, _), listening("d1") as (new, _):
        async with new_membership() as (members, _):
            dial(members, old.address)
            await eventually(lambda: members.live(Role.DECODE))
            moved = dial(members, new.address)
            moved.dialled, moved.incarnation = "tcp://127.0.0.2:1", old.incarnation
            await eventually(lambda: len(members.live(Role.DECODE)) == 2)
