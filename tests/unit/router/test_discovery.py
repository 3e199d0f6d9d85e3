"""Discoveries: what DNS lists, and what membership makes of a listing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.nodes.discovery import DnsDiscovery, Listing
from router.nodes.member import MemberState
from shared.errors import ConfigError
from shared.protocol.messages import Role
from shared.protocol.resolver import Resolver
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.test_membership import TIMING, changes_of, dial, dialled, new_membership


@contextlib.asynccontextmanager
async def listing_of(discovery: DnsDiscovery) -> AsyncIterator[list[Listing]]:
    """What it tells, while it runs."""
    told: list[Listing] = []
    task = asyncio.create_task(discovery.run(told.append))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------- DNS
async def test_dns_lists_every_address_and_a_failure_lists_nothing() -> None:
    class Names:
        def __init__(self) -> None:
            self.hosts = ["10.0.0.2", "10.0.0.3", "10.0.0.2"]
            self.asked = 0

        def __call__(self, host: str, port: int, *, type: int) -> list[tuple[Any, ...]]:
            assert (host, port) == ("nodes.example", 7300)
            self.asked += 1
            if not self.hosts:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (socket.AF_INET6, type, 0, "", ("fd00::1", port, 0, 0)),
                *((socket.AF_INET, type, 0, "", (host, port)) for host in self.hosts),
            ]

    names = Names()
    discovery = dataclasses.replace(DnsDiscovery.of("dns:nodes.example:7300"), poll_s=0.01)
    discovery = dataclasses.replace(discovery, resolver=Resolver(names))
    async with listing_of(discovery) as told:
        await eventually(lambda: told)
        hosts = ("10.0.0.2", "10.0.0.3", "[fd00::1]")
        assert told[-1] == {f"tcp://{host}:7300" for host in hosts}
        names.hosts = []
        asked = names.asked
        await eventually(lambda: names.asked > asked + 2)
        assert all(told)
        names.hosts = ["10.0.0.4"]
        await eventually(lambda: "tcp://10.0.0.4:7300" in told[-1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dns:", "is not HOST"),
        ("dns:nodes.example:0", "is not HOST"),
        ("consul:nodes", "is not dns:NAME[:PORT]"),
    ],
)
def test_a_source_that_is_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--discovery") as refused:
        DnsDiscovery.of(text)
    assert words in str(refused.value)


# ------------------------------------------------------------------------------------------------ membership
async def test_a_node_that_is_listed_no_more_stays_while_it_answers() -> None:
    timing = dataclasses.replace(TIMING, forget_s=0.05)
    async with (
        FakeNode(Role.DECODE, "d0") as kept,
        FakeNode(Role.DECODE, "d1") as gone,
        new_membership(timing=timing) as (membership, events),
    ):
        membership.on_listing([kept.ref.address, gone.ref.address])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 2)
        membership.on_listing([])
        await asyncio.sleep(4 * timing.forget_s)
        assert len(membership.live(Role.DECODE)) == 2 and not events.lost
        await gone.stop()
        await eventually(lambda: [member.node_id for member in membership.members] == ["d0"])


async def test_the_log_names_what_is_known_of_a_listed_node(caplog: pytest.LogCaptureFixture) -> None:
    """DNS knows no role: a node that has never answered is not called a decode node that was lost."""
    caplog.set_level(logging.INFO, "baton")

    async with FakeNode(Role.PREFILL, "p0") as node, new_membership() as (membership, _):
        with socket.create_server(("127.0.0.1", 0)) as server:
            silent = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        membership.on_listing([node.ref.address, silent])
        await eventually(lambda: membership.live(Role.PREFILL))
        (lost,) = (member for member in membership.members if not member.node_id)
        await eventually(lambda: lost.state is MemberState.LOST)
        await membership.remove(lost)
        texts = [record.getMessage() for record in caplog.records]
        assert f"prefill_node_alive node=p0 address={node.ref.address}" in texts
        assert any(text.startswith(f"node_lost address={silent} reason=") for text in texts), texts
        assert f"node_forgotten address={silent}" in texts
        named = dial(membership, silent)
        await eventually(lambda: named.state is MemberState.LOST)
        text = caplog.records[-1].getMessage()
        assert text.startswith(f"decode_node_lost address={silent} reason="), "the operator knows its role"


@pytest.mark.parametrize("joined", [False, True], ids=["listed first", "joined first"])
async def test_a_listed_node_is_dialled_until_it_is_back(joined: bool) -> None:
    """One that is not listed, and is lost at the same time, is forgotten meanwhile."""
    timing = dataclasses.replace(TIMING, forget_s=0.05)
    async with (
        FakeNode(Role.DECODE, "d0") as kept,
        FakeNode(Role.DECODE, "d1") as unlisted,
        new_membership(timing=timing) as (membership, _),
    ):
        node = FakeNode(Role.DECODE, "d2")
        await node.__aenter__()
        known = [kept, unlisted, node] if joined else [unlisted]
        for one in known:
            dial(membership, one.ref.address, pinned=False)
        if joined:
            await eventually(lambda: len(membership.all_live()) == 3)
        membership.on_listing([kept.ref.address, node.ref.address])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 3)
        await node.stop()
        await unlisted.stop()

        def names() -> list[str]:
            return sorted(member.node_id for member in membership.members)

        await eventually(lambda: names() == ["d0", "d2"])
        await asyncio.sleep(4 * (timing.forget_s + timing.redial_s))
        assert names() == ["d0", "d2"]
        member = next(member for member in membership.members if member.node_id == "d2")
        assert member.state in (MemberState.LOST, MemberState.LEFT) and member.role is Role.DECODE
        membership.on_listing([kept.ref.address])
        await eventually(lambda: names() == ["d0"])


async def test_of_two_members_of_one_name_the_connected_one_is_found() -> None:
    """A pod that was started anew has another address, and the name is looked up by operators."""
    async with new_membership() as (membership, events):
        changes = changes_of(membership, events)
        old = FakeNode(Role.DECODE, "d0")
        await old.__aenter__()
        await dialled(membership, old)
        await old.stop()
        await eventually(lambda: not membership.live(Role.DECODE))
        async with FakeNode(Role.DECODE, "d0") as new:
            await dialled(membership, new)
            names = [(member.node_id, member.node is None) for member in membership.members]
            assert names == [("d0", True), ("d0", False)]
            found = changes.find("d0")
            assert found is not None and found.address == new.ref.address
            lost = changes.find(old.ref.address.removeprefix("tcp://"))
            assert lost is not None and lost.address == old.ref.address


async def test_a_node_is_told_to_resume_only_while_it_is_added() -> None:
    """Else each later connection would take back the drain of another router."""
    async with new_membership() as (membership, events), FakeNode(Role.DECODE, "d0") as node:
        changes = changes_of(membership, events)
        for _ in range(2):  # anew, and once more as a member
            member = await changes.add(Role.DECODE, node.ref.address, PATIENCE_S)
            assert member.state is MemberState.ALIVE and member.pinned and not member.resume


async def test_a_node_that_the_operator_removed_is_dialled_when_it_has_been_off_the_list() -> None:
    async with FakeNode(Role.DECODE, "d0") as node, new_membership() as (membership, _):
        listed = [node.ref.address]
        membership.on_listing(listed)
        await eventually(lambda: membership.live(Role.DECODE))
        await membership.remove(membership.members[0])
        membership.on_listing(listed)
        await asyncio.sleep(4 * TIMING.redial_s)
        assert not membership.members
        membership.on_listing([])
        membership.on_listing(listed)
        await eventually(lambda: membership.live(Role.DECODE))


async def test_listed_nodes_without_room_are_named_and_dialled_by_a_later_listing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        FakeNode(Role.DECODE, "d0") as d0,
        FakeNode(Role.DECODE, "d1") as d1,
        new_membership(max_members=1) as (membership, _),
    ):
        first, second = sorted(node.ref.address for node in (d0, d1))
        membership.on_listing([first, second])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 1)
        assert f"member_ignored address={second} members=1" in caplog.text
        await membership.remove(membership.members[0])
        membership.on_listing([first, second])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 1)
        assert [(one.address, one.listed) for one in membership.members] == [(second, True)]
