"""Nodes that an operator adds to a running router, or drains and removes: with scripted nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    Join,
    LinkReport,
    Load,
    NodeRef,
    Peers,
    Role,
)
from tests.patience import eventually
from tests.unit.router.fake_node import FakeNode, one_then_nothing
from tests.unit.router.fakes import (
    joined_pair,
    joined_router,
    joined_trio,
    states,
    until_loads,
    until_states,
    wait_before_story,
)

BODY = {"text": "The quick brown fox", "sampling_params": {"max_new_tokens": 8}}


async def test_the_fleet_is_listed_with_its_load(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        link = LinkReport("prefill-0#1", True, "gloo", {"shm": "the nodes are not on one host"})
        decode.load = Load(num_running=3, num_links=1, links=(link,))
        await until_loads(client, decode)
        nodes = (await client.get("/fleet")).json()["nodes"]
        assert [(node["node_id"], node["role"], node["state"]) for node in nodes] == [
            ("prefill-0", "prefill", "alive"),
            ("decode-0", "decode", "alive"),
        ]
        assert nodes[1]["incarnation"] == decode.ref.incarnation
        assert nodes[1]["load"]["num_running"] == 3
        assert nodes[1]["load"]["links"] == [
            {
                "peer": "prefill-0#1",
                "incoming": True,
                "transport": "gloo",
                "passed_over": {"shm": "the nodes are not on one host"},
            }
        ]
        assert nodes[0]["address"] == prefill.address and nodes[0]["pinned"] is True


async def test_a_drained_node_finishes_what_it_has_and_gets_nothing_new(model_folder: Path) -> None:
    async with joined_trio(model_folder) as ((prefill, decode, other), _, client):
        release = wait_before_story(decode)
        running = asyncio.create_task(client.post("/generate", json=BODY))  # decode-0 comes first
        await decode.wait_for(Decode)
        removing = asyncio.create_task(client.delete("/fleet/nodes/decode-0"))
        await until_states(client, prefill_0="alive", decode_0="draining", decode_1="alive")
        health = (await client.get("/health")).json()
        assert {node["node_id"]: node["state"] for node in health["decode"]} == {
            "decode-0": "draining",
            "decode-1": "alive",
        }
        decode.load = Load(leak="pages with none [7]")
        await until_loads(client, decode)
        drained = (await client.get("/fleet")).json()["nodes"][1]
        assert (drained["load"]["leak"], drained["reason"]) == (decode.load.leak, "removed by the operator")
        info = (await client.get("/get_server_info")).json()
        assert {node["node_id"]: node["state"] for node in info["nodes"]}["decode-0"] == "draining"
        for _ in range(2):
            assert (await client.post("/generate", json=BODY)).status_code == 200
        assert len(decode.all(Decode)) == 1 and len(other.all(Decode)) == 2
        known = prefill.all(Peers)[-1].decode_nodes
        assert decode.ref in known, "its KV may still be on the way"

        release.set()
        answer = await removing
        assert answer.json() == {
            "success": True,
            "node_id": "decode-0",
            "address": decode.address,
            "num_failed_over": 0,
        }
        assert len((await running).json()["output_ids"]) == 8
        assert await states(client) == {"prefill-0": "alive", "decode-1": "alive"}
        assert (await client.get("/health")).json()["status"] == "ok"
        await eventually(lambda: prefill.all(Peers)[-1].decode_nodes == (other.ref,))
        await asyncio.sleep(1.2)  # longer than the pause before a lost node is dialled again
        assert len(decode.identities) == 1


async def test_what_still_runs_after_the_timeout_is_ended_and_the_node_told(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        decode.script = one_then_nothing
        running = asyncio.create_task(client.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        slow = asyncio.create_task(client.delete("/fleet/nodes/decode-0?drain_timeout_s=500"))
        await until_states(client, prefill_0="alive", decode_0="draining")
        assert not slow.done()
        hurried = await client.delete("/fleet/nodes/decode-0?drain_timeout_s=0")
        assert hurried.json()["num_failed_over"] == 1
        assert (await slow).json() == hurried.json(), "it was the same removal"
        ended = await running
        assert ended.status_code == 503
        assert "drain_timeout_s of 0 s" in ended.json()["error"]["message"]
        assert (await decode.wait_for(Cancel)).key == decode.all(Decode)[0].key
        nobody = await client.post("/generate", json=BODY)
        assert nobody.status_code == 503
        assert (await client.delete("/fleet/nodes/prefill-0")).status_code == 200
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "unavailable", "nobody is on the way"


async def test_a_drained_prefill_node_hands_over_first(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        release = wait_before_story(decode)
        running = asyncio.create_task(client.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        removing = asyncio.create_task(client.delete("/fleet/nodes/prefill-0"))
        await until_states(client, prefill_0="draining", decode_0="alive")
        await asyncio.sleep(0.15)
        assert not removing.done(), "nobody has said that the KV arrived"
        assert (await client.get("/health")).json()["status"] == "degraded"
        release.set()
        assert (await removing).status_code == 200
        assert (await running).status_code == 200
        assert (await client.get("/health")).json()["status"] == "ok", "no prefill node is expected now"
        assert not prefill.all(Cancel)


async def test_a_node_that_dies_while_it_is_drained_is_not_dialled_again(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        decode.script = one_then_nothing
        running = asyncio.create_task(client.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        removing = asyncio.create_task(client.delete("/fleet/nodes/decode-0?drain_timeout_s=500"))
        await until_states(client, prefill_0="alive", decode_0="draining")
        port = decode.port
        await decode.stop()
        assert (await removing).status_code == 200
        assert (await running).status_code == 503
        decode.start(port, incarnation="b")
        await asyncio.sleep(1.2)
        assert len(decode.identities) == 1 and await states(client) == {"prefill-0": "alive"}


async def test_a_removed_node_is_not_let_in_when_it_asks_but_its_next_incarnation_is(
    model_folder: Path,
) -> None:
    async with (
        joined_router(model_folder, [], wait=False) as (router, client),
        FakeNode(Role.DECODE) as decode,
    ):
        say = router.membership.on_announcement
        say(Join(decode.ref, Role.DECODE))
        await until_states(client, decode_0="alive")
        assert (await client.delete("/fleet/nodes/decode-0")).status_code == 200
        say(Join(decode.ref, Role.DECODE))
        await asyncio.sleep(0.2)
        assert await states(client) == {} and len(decode.identities) == 1

        # The operator may change their mind,
        added = await client.post("/fleet/nodes", json={"role": "decode", "address": decode.address})
        assert added.json()["node"]["state"] == "alive"
        assert (await client.delete(f"/fleet/nodes/{decode.address}")).status_code == 200
        # and a restarted node is another one.
        await decode.stop()
        decode.start(incarnation="b")
        say(Join(decode.ref, Role.DECODE))
        await until_states(client, decode_0="alive")


async def test_adding_a_node(model_folder: Path) -> None:
    """Its numerics may differ: whether it gets pages is between the nodes."""
    other = FakeNode(Role.DECODE, "decode-1")
    other.layout = msgspec.structs.replace(other.layout, numerics="native-1/amx/bfloat16")
    async with joined_pair(model_folder) as ((prefill, _), _, client), other:
        address = other.address.removeprefix("tcp://")
        for _ in range(2):  # it may be there already
            added = await client.post("/fleet/nodes", json={"role": "decode", "address": address})
            assert added.status_code == 200
            node = added.json()["node"]
            assert (node["node_id"], node["state"], node["pinned"]) == ("decode-1", "alive", True)
        await until_loads(client, other)
        await eventually(lambda: other.ref in prefill.all(Peers)[-1].decode_nodes)
        for _ in range(2):
            assert (await client.post("/generate", json=BODY)).status_code == 200
        assert other.all(Decode)
        port = other.port
        await other.stop()
        other.start(port, incarnation="b")  # it is kept, as if it had been on the command line
        await eventually(lambda: len(other.identities) == 2)


async def test_a_node_that_has_told_no_load_has_none(model_folder: Path) -> None:
    other = FakeNode(Role.DECODE, "decode-1")
    other.silent = True
    async with joined_pair(model_folder) as (_, _, client), other:
        added = await client.post("/fleet/nodes", json={"role": "decode", "address": other.address})
        assert added.json()["node"]["state"] == "alive" and "load" not in added.json()["node"]


STRANGERS: list[tuple[dict[str, Any], str]] = [
    ({"layout": {"page_size": 8}}, "page_size: the fleet has 16, this node has 8"),
    ({"layout": {"page_size": 0}}, "page_size: 0 is below 1"),
    ({"layout": {"dtype": "bfloat16"}}, "dtype: the fleet has 'float32', this node has 'bfloat16'"),
    ({"layout": {"kv_cache_dtype": "int8"}}, "kv_cache_dtype: the fleet has 'none', this node has 'int8'"),
    (
        {"layout": {"quantization": "W4A8 awq"}},
        "quantization: the fleet has 'none', this node has 'W4A8 awq'",
    ),
    ({"layout": {"fingerprint": "another"}}, "is not the model that is served here"),
    ({"role": Role.PREFILL}, "expected a decode node, it is a prefill node"),
    ({"refuses": "router: too many"}, "the node refused: router: too many"),
    *(
        (
            {"version": version},
            f"protocol: the node speaks version {version or 1}, and this end version {PROTOCOL_VERSION}",
        )
        for version in (0, PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2)
    ),
]


async def test_a_node_that_does_not_fit_is_refused_by_name_and_forgotten(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        for change, words in STRANGERS:
            stranger = FakeNode(change.get("role", Role.DECODE), "stranger")
            stranger.layout = msgspec.structs.replace(stranger.layout, **change.get("layout", {}))
            stranger.refuses = change.get("refuses", "")
            stranger.version = change.get("version", PROTOCOL_VERSION)
            async with stranger:
                node = {"role": "decode", "address": stranger.address}
                refused = await client.post("/fleet/nodes", json=node)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert words in error["message"] and error["code"] == "node_refused"
            assert "stranger" not in await states(client)
            assert (await client.get("/health")).json()["status"] == "ok"


@pytest.mark.parametrize("name", ["gone.invalid", "gone.invalid:7200", "tcp://gone.invalid:7200"])
async def test_a_node_is_removed_by_the_address_with_which_it_was_added(
    model_folder: Path, name: str
) -> None:
    async with joined_router(model_folder, [], wait=False) as (router, client):
        router.membership.on_announcement(Join(NodeRef("d", "d#a", "tcp://gone.invalid:7200"), Role.DECODE))
        removed = await client.delete(f"/fleet/nodes/{name}")
        assert removed.status_code == 200 and removed.json()["address"] == "tcp://gone.invalid:7200"
        assert await states(client) == {}


async def test_what_cannot_be_added_or_removed(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        for body, words in (
            ({"role": "decode", "address": "127.0.0.1:1"}, "127.0.0.1:1 cannot be reached: connection"),
            ({"role": "decode", "address": "no-such-host.invalid"}, "no-such-host.invalid does not resolve"),
            ({"role": "decode", "address": "no..name:7"}, "no..name does not resolve"),
            ({"role": "decode", "address": "no port:x"}, "'no port:x' is not HOST[:PORT]"),
            ({"role": "decode"}, "address is missing"),
            ({"role": "router", "address": "a"}, "role must be"),
            ({"role": "prefill", "address": decode.address}, "is known as a decode node"),
        ):
            refused = await client.post("/fleet/nodes", json=body)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"], body
        unknown = await client.delete("/fleet/nodes/decode-9")
        assert unknown.status_code == 404 and "decode-9" in unknown.json()["error"]["message"]
        for seconds in ("-1", "nan", "soon"):
            wrong = await client.delete(f"/fleet/nodes/decode-0?drain_timeout_s={seconds}")
            assert wrong.status_code == 400 and "drain_timeout_s" in wrong.json()["error"]["message"]
        assert await states(client) == {"prefill-0": "alive", "decode-0": "alive"}
