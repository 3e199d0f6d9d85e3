"""Health, information, cache and profiles, and who may join."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from router.config import FleetOptions, HttpOptions, RouterConfig
from router.nodes.live_node import LiveNode, Timing
from router.nodes.node_link import NodeLink
from router.topology import LocalTopology
from shared.protocol.messages import (
    Announcement,
    Decode,
    Flush,
    Join,
    Load,
    LoadFailed,
    Loading,
    NodeRef,
    Pong,
    Prefill,
    Role,
    StartProfile,
    StopProfile,
)
from shared.protocol.security import FleetKey
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fake_node import LAYOUT, FakeNode
from tests.unit.router.fakes import (
    join_socket_of,
    joined_pair,
    joined_router,
    new_client,
    serving_router,
    until_health,
)


async def test_health_generate_goes_through_both_fleets(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        assert (await client.get("/health_generate")).json()["status"] == "ok"
        assert prefill.all(Prefill)[0].decode == decode.ref
        assert decode.all(Decode)[0].prefill == prefill.ref


async def test_a_load_that_is_asked_for_is_newer_than_the_call() -> None:
    """A pong that was under way before, and one that tells of a change of links, are no answers to it."""
    async with FakeNode(Role.DECODE) as decode:
        with (
            zmq.asyncio.Context() as context,
            contextlib.closing(NodeLink(context, decode.address, "router|here", None)) as link,
        ):
            hello = await link.hello("here", PATIENCE_S)
            node = LiveNode(hello, link, Timing())
            decode.load = Load(num_running=3)
            asked = [asyncio.create_task(node.refresh()) for _ in range(2)]
            for seq in (1, 2, 0):
                node.pong(Pong(seq, Load(num_running=1)), 0.0)
                await asyncio.wait(asked, timeout=0.05)
                assert not any(one.done() for one in asked)
            for _ in asked:
                answer = await link.receive()
                assert isinstance(answer, Pong)
                node.pong(answer, 0.0)
            await asyncio.gather(*asked)
            assert node.load.num_running == 3


async def test_information(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        decode.flags = {"page_size": 16}
        for path in ("/model_info", "/get_model_info"):
            model = (await client.get(path)).json()
            assert model["model_path"] == model["tokenizer_path"] == str(model_folder)
            assert model["vocab_size"] > 256 and model["is_generation"] is True
            assert (model["max_model_len"], model["weight_version"]) == (256, "default")
        decode.load = Load(num_pages=10, num_free_pages=4)
        for path in ("/server_info", "/get_server_info"):

            async def told(path: str = path) -> dict[str, Any] | None:
                server: dict[str, Any] = (await client.get(path)).json()
                return server if server["internal_states"][1]["num_free_pages"] == 4 else None

            server = await eventually(told)
            assert (server["context_length"], server["page_size"], server["max_model_len"]) == (256, 16, 256)
            assert (server["quantization"], server["kv_cache_dtype"]) == (None, "float32")
            assert server["max_total_num_tokens"] == 200
            assert [state["node_id"] for state in server["internal_states"]] == ["prefill-0", "decode-0"]
            assert "api_key" not in server


async def test_information_of_a_quantized_fleet(model_folder: Path) -> None:
    layout = msgspec.structs.replace(LAYOUT, quantization="W4A8 awq", kv_cache_dtype="int8")
    async with (
        FakeNode(Role.DECODE, layout=layout) as decode,
        joined_router(model_folder, [decode]) as (_, client),
    ):
        server = (await client.get("/server_info")).json()
        assert (server["dtype"], server["quantization"], server["kv_cache_dtype"]) == (
            "float32",
            "W4A8 awq",
            "int8",
        )


async def test_flush_waits_for_its_timeout_only(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        assert (await client.post("/flush_cache")).json()["nodes"] == ["decode-0", "prefill-0"]
        decode.flushes = False
        busy = await client.get("/flush_cache")
        assert busy.status_code == 400 and "decode-0" in busy.json()["error"]["message"]
        num_before = len(decode.all(Flush))
        waiting = asyncio.create_task(client.post("/flush_cache?timeout=600"))
        await decode.wait_for(Flush, num_before + 3)
        assert not waiting.done()
        decode.flushes = True
        assert (await waiting).status_code == 200


async def test_a_flush_whose_client_has_gone_is_given_up(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        decode.flushes = False
        waiting = asyncio.create_task(client.post("/flush_cache?timeout=600"))
        await decode.wait_for(Flush, 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        seen = 0
        while seen < len(decode.all(Flush)):
            seen = len(decode.all(Flush))
            await asyncio.sleep(0.5)  # ten times as long as between two of them


async def test_every_node_is_profiled_or_the_refusal_names_who_was_not(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        begun = await client.post("/start_profile", json={"num_steps": 7, "with_stack": True})
        assert begun.json() == {
            "success": True,
            "traces": {"decode-0": "/traces/decode-0", "prefill-0": "/traces/prefill-0"},
        }
        call = decode.profile_calls[0]
        assert isinstance(call, StartProfile)
        assert (call.num_steps, call.with_stack, call.record_shapes) == (7, True, False)
        assert (await client.post("/stop_profile")).json()["success"]
        assert isinstance(prefill.profile_calls[1], StopProfile)
        decode.profiles = False
        refused = await client.post("/start_profile")
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "decode-0: /traces/decode-0; done on prefill-0"
        assert prefill.profile_calls[2].num_steps is None  # type: ignore[union-attr]
        wrong = await client.post("/start_profile", json={"num_steps": -1})
        assert wrong.status_code == 400 and "num_steps" in wrong.json()["error"]["message"]


async def say(socket: zmq.asyncio.Socket, message: Announcement) -> None:
    await socket.send(msgspec.msgpack.encode(message))


WAITING = RouterConfig(
    model=None,
    fleet=FleetOptions(local=LocalTopology(0, 0)),
    http=HttpOptions(port=0, served_model_name="tiny"),
)
"""Of a router that nodes join by themselves."""


async def test_a_node_joins_by_itself(model_folder: Path) -> None:
    async with (
        serving_router(WAITING) as router,
        join_socket_of(router.membership.on_announcement) as control_port,
        FakeNode(Role.DECODE, flags={"model": str(model_folder)}) as decode,
        new_client(router.url) as client,
    ):
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as caller:
            caller.connect(f"tcp://127.0.0.1:{control_port}")
            await caller.send(b"nonsense")
            await say(caller, Loading("decode-9", Role.DECODE, "weights", 0.5))
            await say(caller, LoadFailed("decode-9", Role.DECODE, "no such file"))
            loading = {"node_id": "decode-0", "role": "decode", "state": "loading"}
            loading |= {"what": "weights", "fraction": 0.5}

            async def told() -> bool:
                await say(caller, Loading("decode-0", Role.DECODE, "weights", 0.5))  # it is soon forgotten
                found = (await client.get("/health")).json()["decode"]
                return found and found[0] == loading

            await eventually(told)
            for _ in range(3):
                await say(caller, Join(decode.ref, Role.DECODE))
            await router.ready()
            assert router.model.name() == "tiny"  # and the model was learnt from the node
            health = (await client.get("/health")).json()
            assert [node["state"] for node in health["decode"]] == ["alive"]
            assert len(decode.identities) == 1
            body = {"text": "a", "sampling_params": {"max_new_tokens": 3}}
            assert (await client.post("/generate", json=body)).status_code == 200
            await decode.stop()
            decode.start(incarnation="b")  # another port, as after a restart
            await until_health(client, "unavailable")
            await say(caller, Join(decode.ref, Role.DECODE))
            assert len((await until_health(client, "ok")).json()["decode"]) == 1


async def test_more_nodes_than_zmq_has_sockets_by_default_can_be_dialled() -> None:
    """Each dial takes three, of 1023."""
    with socket.create_server(("", 0), backlog=400) as mute, contextlib.ExitStack() as accepted:
        mute.setblocking(False)
        hosts = [f"127.1.{i // 200}.{i % 200 + 1}" for i in range(400)]
        async with (
            serving_router(WAITING) as router,
            new_client(router.url) as client,
        ):
            for host in hosts:
                ref = NodeRef(host, "a", f"tcp://{host}:{mute.getsockname()[1]}")
                router.membership.on_announcement(Join(ref, Role.DECODE))
            dialled: set[str] = set()
            async with asyncio.timeout(PATIENCE_S):
                while len(dialled) < len(hosts):
                    connection, _ = await asyncio.get_running_loop().sock_accept(mute)
                    accepted.enter_context(connection)
                    dialled.add(connection.getsockname()[0])
            nodes = (await client.get("/fleet")).json()["nodes"]
            assert len(nodes) == len(hosts)
            assert not [node for node in nodes if "Too many open files" in node.get("reason", "")]


async def test_with_a_fleet_key_strangers_stay_outside() -> None:
    ours, other = FleetKey(b"a secret of the whole fleet"), FleetKey(b"another secret, also long enough")
    context, heard = zmq.asyncio.Context.instance(), list[Announcement]()
    async with join_socket_of(heard.append, ours) as control_port:
        with contextlib.ExitStack() as exits:
            for key, name in ((None, "plain"), (other, "other"), (ours, "ours")):
                caller = exits.enter_context(context.socket(zmq.DEALER))
                caller.linger = 0
                if key is not None:
                    key.secure_client(caller, "")
                caller.connect(f"tcp://127.0.0.1:{control_port}")
                await say(caller, Loading(name, Role.DECODE, "weights", 0.1))
            await eventually(lambda: heard)
            await asyncio.sleep(0.3)
            assert heard == [Loading("ours", Role.DECODE, "weights", 0.1)]
