"""Order, failure and disconnection, over real sockets and a real HTTP server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.config import DispatchOptions
from shared.protocol.messages import (
    Cancel,
    Decode,
    Failed,
    Leaving,
    Load,
    Peers,
    Pong,
    Prefill,
    Role,
)
from tests.unit.router.fake_node import FakeNode, one_then_nothing, say_nothing, tell_story
from tests.unit.router.fakes import (
    events,
    figure,
    joined_pair,
    joined_router,
    until_health,
    until_queued,
)
from tests.unit.router.raw_client import post, raw_client

PARAMS = {"sampling_params": {"max_new_tokens": 12}}


async def test_failed_in_mid_stream_is_an_event(model_folder: Path) -> None:
    async def fail_later(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, node.story[:3])
        node.send(Failed(message.key, 500, "out of memory"))

    async with joined_pair(model_folder, decode=fail_later) as ((_, decode), _, client):
        body = {"text": "a", "stream": True, **PARAMS}
        response = await client.post("/generate", json=body)
        *_, last_text, error, done = events(response.text)
        assert response.status_code == 200 and done == "[DONE]"
        assert last_text["output_ids"] == decode.story[:3]
        assert error["error"]["message"] == "out of memory"
        chat = {"prompt": "a", "stream": True, "max_tokens": 12}
        *_, error, done = events((await client.post("/v1/completions", json=chat)).text)
        assert done == "[DONE]" and error["error"]["type"] == "server_error"


async def test_one_failure_in_a_batch_names_its_index_and_ends_the_others(model_folder: Path) -> None:
    async def fail_the_second(node: FakeNode, message: Prefill | Decode) -> None:
        if len(message.work.input_ids) == 2:
            node.send(Failed(message.key, 400, "bad"))

    async with joined_pair(model_folder, prefill=say_nothing, decode=fail_the_second) as (nodes, _, client):
        response = await client.post("/generate", json={"input_ids": [[1], [1, 2], [1, 2, 3]]})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "prompt 1: bad"
        await nodes[1].wait_for(Cancel, 2)
        await nodes[0].wait_for(Cancel, 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "decoding"])
async def test_client_disconnect_cancels_everywhere(model_folder: Path, stream: bool, stage: str) -> None:
    script = say_nothing if stage == "queued" else one_then_nothing

    async with (
        joined_pair(model_folder, prefill=script, decode=script) as ((prefill, decode), router, client),
        raw_client(router.http_port) as leaving,
    ):
        leaving.send(post("/generate", {"text": "hello", "stream": stream, **PARAMS}))
        await decode.wait_for(Decode)
        if stage == "decoding":
            await until_queued(client, 0)
        if stream and stage == "decoding":
            await leaving.read_until(b"data: ")
        leaving.writer.close()
        assert (await decode.wait_for(Cancel)).key == decode.all(Decode)[0].key
        if stage == "queued":
            await prefill.wait_for(Cancel)
        else:
            assert not prefill.all(Cancel)  # the decode node has spoken: the prefill node let go
        assert await figure(client, "sglang:num_aborted_requests_total") == 1
        assert await figure(client, "baton:num_queued_reqs") == 0, "its place is free"


async def test_a_restarted_node_is_dialled_again_with_a_new_identity(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        first_ref = decode.ref
        await decode.stop()
        await until_health(client, "unavailable")
        refused = await client.post("/generate", json={"text": "a", **PARAMS})
        assert refused.status_code == 503
        assert "decode-0 is lost" in refused.json()["error"]["message"]
        decode.start(decode.port, incarnation="b")
        await until_health(client, "ok")
        assert len(set(decode.identities)) == len(decode.identities) == 2
        assert all(identity.startswith("router|") for identity in decode.identities)
        assert (await client.post("/generate", json={"text": "a", **PARAMS})).status_code == 200
        assert decode.ref != first_ref and prefill.all(Prefill)[-1].decode == decode.ref
        assert prefill.all(Peers)[-1].decode_nodes == (decode.ref,)


async def test_what_a_leaving_node_said_last_still_counts(model_folder: Path) -> None:
    async def finish_and_leave(node: FakeNode, message: Prefill | Decode) -> None:
        await tell_story(node, message)
        node.send(Leaving("told to"))
        node._socket.close()

    async with joined_pair(model_folder, decode=finish_and_leave) as (_, _, client):
        answer = await client.post("/generate", json={"text": "a", **PARAMS})
        assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 12
        health = await until_health(client, "unavailable")
        assert health.status_code == 503
        assert health.json()["decode"][0]["state"] == "left"
        assert health.json()["decode"][0]["reason"] == "told to"


async def test_a_request_to_an_idle_node_whose_loop_stands_still_goes_on_at_another(
    model_folder: Path,
) -> None:
    async def tell_what_it_prefills(node: FakeNode, message: Decode) -> None:
        if message.prefill is None:
            await tell_story(node, message)

    dispatch = DispatchOptions(local_prefill_tokens=0, node_timeout_s=1.2)
    async with joined_pair(
        model_folder, prefill=say_nothing, decode=tell_what_it_prefills, dispatch=dispatch
    ) as ((prefill, decode), _, client):
        prefill.stalled = True
        answer = await client.post("/generate", json={"text": "a", **PARAMS})
        assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 12
        assert [message.prefill for message in decode.all(Decode)] == [prefill.ref, None]
        health = (await client.get("/health")).json()
        assert health["decode"][0]["state"] == "alive"
        assert "no progress for" in health["prefill"][0]["reason"]


@pytest.mark.parametrize(
    ("script", "deadline"),
    [(say_nothing, {"queue_timeout_s": 0.3}), (one_then_nothing, {"stall_timeout_s": 0.3})],
)
async def test_deadlines(model_folder: Path, script: object, deadline: dict[str, Any]) -> None:
    dispatch = DispatchOptions(local_prefill_tokens=0, **deadline)
    async with joined_pair(model_folder, prefill=say_nothing, decode=script, dispatch=dispatch) as (
        nodes,
        _,
        client,
    ):
        response = await client.post("/generate", json={"text": "a", **PARAMS})
        assert response.status_code == 408
        await nodes[1].wait_for(Cancel)
        body = {"text": "a", "stream": True, **PARAMS}
        streamed = await client.post("/generate", json=body)
        if script is say_nothing:
            assert streamed.status_code == 408
        else:
            _, error, done = events(streamed.text)
            assert error["error"]["code"] == "deadline" and done == "[DONE]"


async def test_degraded_without_prefill_nodes(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        await prefill.stop()
        health = await until_health(client, "degraded")
        assert health.status_code == 200 and "prefill-0 is lost" in health.json()["reason"]
        for wanted in (0, 1, 12):
            body = {"text": "a", "sampling_params": {"max_new_tokens": wanted}}
            answer = await client.post("/generate", json=body)
            assert answer.json()["meta_info"]["completion_tokens"] == wanted
        assert all(sent.prefill is None for sent in decode.all(Decode))
        assert (await client.get("/health_generate")).status_code == 503


@pytest.mark.parametrize("hung", [Role.PREFILL, Role.DECODE])
async def test_degraded_without_a_link(model_folder: Path, hung: Role) -> None:
    """One end says so at once, unasked; the decode node prefills by itself until there is a link again."""
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        ends = (decode, prefill) if hung is Role.PREFILL else (prefill, decode)
        body = {"text": "a long prompt, to be split " * 4, **PARAMS}
        assert (await client.post("/generate", json=body)).status_code == 200
        assert decode.all(Decode)[-1].prefill is not None
        gone = Load(unreachable={ends[1].ref.incarnation: "silent for 5 s"})
        for load, status in ((gone, "degraded"), (Load(), "ok")):
            ends[0].load = load
            ends[0].send(Pong(0, load))
            health = (await until_health(client, status)).json()
            answer = await client.post("/generate", json=body)
            assert answer.json()["output_ids"] == decode.story[:12]
            assert (decode.all(Decode)[-1].prefill is None) == (load is gone)
            if load is gone:
                assert "(silent for 5 s)" in health["reason"]


async def test_a_node_that_leaks_is_drained(model_folder: Path) -> None:
    """It gets nothing new, what it has ends well, and /health says what is wrong."""
    async with (
        FakeNode(Role.DECODE, "decode-0") as leaking,
        FakeNode(Role.DECODE, "decode-1") as sound,
        joined_router(model_folder, [leaking, sound]) as (_, client),
    ):
        leaking.delay_s = sound.delay_s = 0.05
        running = [asyncio.create_task(client.post("/generate", json={"text": "a", **PARAMS})) for _ in "ab"]
        await leaking.wait_for(Decode)
        leaking.load = Load(leak="pages with none [7]")
        leaking.send(Pong(0, leaking.load))
        health = (await until_health(client, "degraded")).json()
        assert "pages with none [7]" in health["reason"]
        assert [node["state"] for node in health["decode"]] == ["draining", "alive"]
        assert [(await answer).status_code for answer in running] == [200, 200]
        for _ in range(4):
            assert (await client.post("/generate", json={"text": "a", **PARAMS})).status_code == 200
        assert len(leaking.all(Decode)) == 1
