"""Nodes that take the other role while requests run: with scripted nodes and one or two routers."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import httpx
import msgspec
import pytest

from router.dispatch.node import Node
from router.nodes.fleet_changes import FleetChanges
from router.nodes.member import Member, MemberState
from router.nodes.shared_news import SharedNews
from shared.errors import RequestError
from shared.protocol.messages import (
    Answered,
    Decode,
    Drain,
    Drained,
    Draining,
    Load,
    NodeLimits,
    Peers,
    Prefill,
    Role,
    SetRole,
)
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import joined_router, joined_trio, pair, until_loads, wait_before_story
from tests.unit.router.test_fleet_changes import BODY
from tests.unit.router.test_membership import TIMING, NoReqs, changes_of, dialled, new_membership
from tests.unit.router.test_shared_news import two_routers

Roles = dict[str, tuple[str, str]]


async def roles(client: httpx.AsyncClient) -> Roles:
    nodes = (await client.get("/fleet")).json()["nodes"]
    return {node["node_id"]: (node["role"], node["state"]) for node in nodes}


async def until_roles(client: httpx.AsyncClient, **wanted: tuple[str, str]) -> None:
    named = {name.replace("_", "-"): seen for name, seen in wanted.items()}
    while not named.items() <= (await roles(client)).items():
        await asyncio.sleep(0.01)


async def set_role(
    client: httpx.AsyncClient, node: str, role: str, drain_timeout_s: float = 60
) -> httpx.Response:
    path = f"/fleet/nodes/{node}/role?drain_timeout_s={drain_timeout_s}"
    return await client.post(path, json={"role": role})


async def test_a_node_finishes_what_it_has_and_comes_back_in_the_other_role(model_folder: Path) -> None:
    async with joined_trio(model_folder) as ((prefill, decode, other), _, client):
        before = decode.ref
        release = wait_before_story(decode)
        running = asyncio.create_task(client.post("/generate", json=BODY))  # decode-0 comes first
        await decode.wait_for(Decode)
        changing = asyncio.create_task(set_role(client, "decode-0", "prefill"))
        await until_roles(client, decode_0=("decode", "draining"))
        (node,) = [n for n in (await client.get("/fleet")).json()["nodes"] if n["node_id"] == "decode-0"]
        assert node["reason"] == "it becomes a prefill node"
        assert (await client.post("/generate", json=BODY)).status_code == 200
        assert len(decode.all(Decode)) == 1 and not decode.all(Drained), "a request still runs there"
        decode.limits = NodeLimits(context_length=100, max_total_num_tokens=150, max_running_requests=3)
        decode.load = Load(num_prompt_tokens=7)

        release.set()
        changed = (await changing).json()
        assert len((await running).json()["output_ids"]) == 8
        assert changed["success"] is True
        assert (changed["node"]["role"], changed["node"]["state"]) == ("prefill", "alive")
        assert changed["node"]["incarnation"] == decode.ref.incarnation != before.incarnation
        assert changed["node"]["address"] == before.address
        await until_loads(client, decode)
        await decode.wait_for(Peers)
        assert decode.all(Peers)[-1] == Peers((other.ref,))
        assert prefill.all(Peers)[-1].decode_nodes == (other.ref,)
        info = {n["node_id"]: n for n in (await client.get("/server_info")).json()["nodes"]}
        assert info["decode-0"]["limits"]["max_total_num_tokens"] == 150, "it has announced them anew"
        health = (await client.get("/health")).json()
        assert health["status"] == "ok" and len(health["prefill"]) == 2 and len(health["decode"]) == 1

        while not decode.all(Prefill):
            assert (await client.post("/generate", json=BODY)).status_code == 200
        back = await set_role(client, "decode-0", "decode")
        assert back.json()["node"]["role"] == "decode"
        num_before = len(decode.all(Decode))
        while len(decode.all(Decode)) == num_before:
            assert (await client.post("/generate", json=BODY)).status_code == 200


async def test_a_node_that_leaves_before_it_answers_again_has_left_for_the_role(model_folder: Path) -> None:
    async with joined_trio(model_folder) as ((_, decode, _), _, client):
        release = wait_before_story(decode)
        running = asyncio.create_task(client.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        changing = asyncio.create_task(set_role(client, "decode-0", "prefill"))
        await decode.wait_for(SetRole)
        decode.hears_roles = False
        again = asyncio.create_task(set_role(client, "decode-0", "prefill"))
        await decode.wait_for(SetRole, 2)
        release.set()
        for answer in (await again, await changing):
            assert (answer.json()["success"], answer.json()["node"]["role"]) == (True, "prefill")
        assert (await running).status_code == 200


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_a_node_that_has_left_for_its_role_is_not_removed(model_folder: Path, is_pinned: bool) -> None:
    async with joined_trio(model_folder) as ((_, decode, _), router, client):
        for member in router.membership.members:
            member.pinned = is_pinned
        decode.may_return.clear()
        changing = asyncio.create_task(set_role(client, "decode-0", "prefill"))
        await until_roles(client, decode_0=("decode", "left"))
        refused = await client.delete("/fleet/nodes/decode-0")
        assert refused.status_code == 409
        assert "prefill node" in refused.json()["error"]["message"]
        decode.may_return.set()
        assert (await changing).json()["node"]["state"] == "alive"
        assert (await client.delete("/fleet/nodes/decode-0")).status_code == 200
        assert "decode-0" not in await roles(client)


async def test_a_node_that_comes_back_in_its_role_and_is_refused_can_be_removed(model_folder: Path) -> None:
    async with joined_trio(model_folder) as ((_, decode, _), _, client):
        decode.layout = msgspec.structs.replace(decode.layout, fingerprint="another model")
        changing = asyncio.create_task(set_role(client, "decode-0", "prefill"))
        while (await roles(client))["decode-0"][1] != "refused":
            await asyncio.sleep(0.01)
        assert (await client.delete("/fleet/nodes/decode-0")).status_code == 200
        changing.cancel()


async def test_a_node_that_does_not_answer_keeps_its_role() -> None:
    async with FakeNode(Role.PREFILL) as node, new_membership() as (membership, events):
        changes = changes_of(membership, events, answer_s=0.1)
        node.hears_roles = False
        member = await dialled(membership, node)
        with pytest.raises(RequestError, match=r"0\.1 s") as refused:
            await changes.change_role(member, Role.DECODE, 1.0, 1.0)
        assert refused.value.status == 409
        assert (member.role, member.state, member.next_role) == (Role.PREFILL, MemberState.ALIVE, None)
        await changes.close()


async def test_a_node_that_is_lost_answers_for_no_other() -> None:
    async with (
        FakeNode(Role.PREFILL) as lost,
        FakeNode(Role.DECODE) as other,
        new_membership() as (membership, events),
    ):
        changes_of(membership, events)
        for fake in (lost, other):
            await dialled(membership, fake)
            fake.hears_roles = False
        call = membership.call(lambda call_id: SetRole(call_id, Role.DECODE, 0.0), PATIENCE_S)
        calling = asyncio.create_task(call)
        await lost.wait_for(SetRole)
        asked = await other.wait_for(SetRole)
        await lost.stop()
        await eventually(lambda: len(membership.all_live()) == 1)
        other.send(Answered(asked.call_id, True, ""))
        answers = await calling
        assert answers[other.ref.node_id] == Answered(asked.call_id, True, "")
        assert answers[lost.ref.node_id] == Answered(0, False, "it was lost before it answered")


async def test_all_routers_let_the_node_go_before_it_leaves(model_folder: Path) -> None:
    async with (
        FakeNode(Role.DECODE, "decode-1") as second,
        two_routers(model_folder, second) as ((prefill, decode), one, other),
    ):
        release = wait_before_story(decode)
        running = asyncio.create_task(other.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        changing = asyncio.create_task(set_role(one, "decode-0", "prefill"))
        await until_roles(other, decode_0=("decode", "draining"))
        await decode.wait_for(Drained)  # from the router that was asked
        async with joined_router(model_folder, [prefill, second, decode], wait=False) as (_, late):
            await until_roles(late, decode_0=("decode", "draining"))
            await decode.wait_for(Drained, 2)
            assert not changing.done() and not running.done()
            release.set()
            assert (await running).status_code == 200
            assert (await changing).status_code == 200
            for client in (one, other, late):
                await until_roles(client, decode_0=("prefill", "alive"), decode_1=("decode", "alive"))
                assert (await client.post("/generate", json=BODY)).status_code == 200


async def test_what_cannot_take_a_role(model_folder: Path) -> None:
    fixed = FakeNode(Role.PREFILL, "fixed")
    fixed.fixed_role = True
    async with (
        pair() as (prefill, decode),
        fixed,
        joined_router(model_folder, [prefill, decode, fixed], wait=False) as (_, client),
    ):
        prefill.refuses_role = "it is being removed"
        await until_roles(client, fixed=("prefill", "alive"), decode_0=("decode", "alive"))
        await until_roles(client, prefill_0=("prefill", "alive"))
        for node, role, status, words in (
            ("decode-0", "prefill", 409, "decode-0 cannot become a prefill node: no other decode node"),
            ("prefill-0", "decode", 409, "prefill-0 cannot become a decode node: it is being removed"),
            ("fixed", "decode", 409, "fixed cannot become a decode node: it was started with --fixed-role"),
            ("decode-9", "decode", 404, "decode-9"),
            ("decode-0", "router", 400, "role must be"),
        ):
            refused = await set_role(client, node, role)
            assert refused.status_code == status and words in refused.json()["error"]["message"]
        nothing_to_do = await set_role(client, "decode-0", "decode")
        assert nothing_to_do.json()["node"]["incarnation"] == decode.ref.incarnation
        assert not decode.all(SetRole)
        assert await roles(client) == {
            "prefill-0": ("prefill", "alive"),
            "decode-0": ("decode", "alive"),
            "fixed": ("prefill", "alive"),
        }
        assert (await client.post("/generate", json=BODY)).status_code == 200
        await decode.stop()
        await until_roles(client, decode_0=("decode", "lost"))
        lost = await set_role(client, "decode-0", "prefill")
        assert lost.status_code == 409 and "it is lost" in lost.json()["error"]["message"]


async def test_two_decode_nodes_do_not_leave_at_the_same_time(model_folder: Path) -> None:
    async with joined_trio(model_folder) as (_, _, client):
        both = await asyncio.gather(*(set_role(client, name, "prefill") for name in ("decode-0", "decode-1")))
        assert sorted(answer.status_code for answer in both) == [200, 409]


async def test_a_change_and_a_removal(model_folder: Path) -> None:
    """Of a node that takes another role, the removal holds; a node that is being removed takes no role."""
    async with (
        FakeNode(Role.DECODE, "decode-1") as second,
        two_routers(model_folder, second) as ((_, decode), one, other),
    ):
        release = wait_before_story(decode)
        running = asyncio.create_task(other.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        changing = asyncio.create_task(set_role(one, "decode-0", "prefill"))
        await until_roles(other, decode_0=("decode", "draining"))
        contrary = await set_role(other, "decode-0", "decode")
        assert contrary.status_code == 409 and "becomes a prefill" in contrary.json()["error"]["message"]
        added = await one.post("/fleet/nodes", json={"role": "decode", "address": decode.address})
        assert added.status_code == 400 and "is being drained" in added.json()["error"]["message"]

        removing = asyncio.create_task(other.delete("/fleet/nodes/decode-0"))
        given_up = await changing
        assert given_up.status_code == 409
        assert "decode-0 " in given_up.json()["error"]["message"]
        assert (await set_role(other, "decode-0", "prefill")).status_code == 409
        release.set()
        assert (await removing).status_code == 200 and (await running).status_code == 200
        for client in (one, other):
            while "decode-0" in await roles(client):
                await asyncio.sleep(0.01)
        assert decode.all(Drain) and decode.role is Role.DECODE


class OneReq(NoReqs):
    """Of a router with one sequence, which stays for as long as it is held."""

    is_held = True

    def num_held(self, node: Node) -> int:
        return int(self.is_held)

    def move_held(self, node: Node) -> None:
        pass


@pytest.mark.parametrize("takes_it", [False, True])
async def test_a_removal_waits_until_it_is_known_whether_the_node_takes_a_role(takes_it: bool) -> None:
    """It may have said so before it heard of its removal."""
    heard: list[Role | None] = []

    class Listening(FleetChanges):
        def on_draining(self, member: Member, draining: Draining) -> None:
            heard.append(draining.role)
            super().on_draining(member, draining)

    async with FakeNode(Role.PREFILL) as node, new_membership() as (membership, events):
        reqs = OneReq()
        news = SharedNews(membership.all_live, "router")
        changes = Listening(membership, reqs, news, lambda rid: None)
        membership.report_to(events, changes)
        member = await dialled(membership, node)
        removing = asyncio.create_task(changes.remove(member, PATIENCE_S))
        await eventually(lambda: heard == [None])
        changes.on_draining(member, Draining(PATIENCE_S, role=Role.DECODE))
        reqs.is_held = False
        await asyncio.sleep(0.3)
        assert not removing.done() and member in membership.members
        if takes_it:
            await node.become(Role.DECODE)
            with pytest.raises(RequestError, match="decode node"):
                await removing
            await eventually(lambda: (member.state, member.role) == (MemberState.ALIVE, Role.DECODE))
        else:
            changes.on_draining(member, Draining(PATIENCE_S))
            assert await removing == 0
            assert member not in membership.members
        await changes.close()


async def test_a_node_that_has_left_for_its_role_is_not_lost_while_it_is_away() -> None:
    timing = dataclasses.replace(TIMING, hello_s=PATIENCE_S)
    async with FakeNode(Role.PREFILL) as node, new_membership(timing=timing) as (membership, events):
        changes = changes_of(membership, events)
        member = await dialled(membership, node)
        node.may_return.clear()
        changing = asyncio.create_task(changes.change_role(member, Role.DECODE, 0.0, PATIENCE_S))
        await eventually(lambda: member.state is MemberState.LEFT)
        await asyncio.sleep(10 * timing.redial_s)
        assert member.state is MemberState.LEFT and member.next_role is Role.DECODE
        node.may_return.set()
        assert (await changing).role is Role.DECODE
        await changes.close()


@pytest.mark.parametrize("restarts", ["no", "there", "elsewhere"])
async def test_a_node_that_dies_meanwhile(restarts: str) -> None:
    """A node that was restarted has the role of its flags. One of --local has another port then."""
    async with FakeNode(Role.PREFILL) as node, new_membership() as (membership, events):
        changes = changes_of(membership, events)
        member = await dialled(membership, node)
        node.comes_back = False
        changing = asyncio.create_task(changes.change_role(member, Role.DECODE, 0.0, 3.0))
        await eventually(lambda: member.state is MemberState.LOST)
        if restarts != "no":
            node.start(node.port if restarts == "there" else 0, incarnation="b")
        if restarts == "elsewhere":
            await membership.remove(member)
            membership.dial(node.ref.address, Role.PREFILL, pinned=False)
        words = "it is lost" if restarts == "no" else "was restarted as a prefill node"
        with pytest.raises(RequestError, match=words) as refused:
            await changing
        assert refused.value.status == 503
        await changes.close()


async def test_the_role_of_the_hello_counts(model_folder: Path) -> None:
    """A router that was told another one at its start takes the node as what it is."""
    async with pair() as (prefill, decode), FakeNode(Role.PREFILL, "changed") as changed:
        told = FakeNode(Role.DECODE)
        told.address = changed.address
        async with joined_router(model_folder, [prefill, decode, told]) as (_, client):
            await until_roles(client, changed=("prefill", "alive"))
