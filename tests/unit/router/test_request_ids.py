"""x-request-id on every answer, and as the rid of a request."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import openai
import pytest

from router.http.config import DispatchOptions, HttpOptions
from shared.protocol.messages import Decode
from tests.patience import eventually
from tests.unit.router.fake_node import one_then_nothing, say_nothing
from tests.unit.router.fakes import joined_pair, joined_router, openai_client

HEADER = "x-request-id"
RANDOM = re.compile(r"[0-9a-f]{32}")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_every_answer_has_one(model_folder: Path) -> None:
    http = HttpOptions(port=0, api_keys=("k",), allowed_origins=("https://page.example",))
    dispatch = DispatchOptions(local_prefill_tokens=0, max_queued_requests=1)
    async with joined_pair(model_folder, http=http, dispatch=dispatch, wait=False) as (_, _, client):
        known = {"Authorization": "Bearer k"}
        while not (await client.get("/server_info", headers=known)).json()["nodes"]:
            await asyncio.sleep(0.01)
        preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        for method, path, headers, body, status in (
            ("GET", "/health", {}, None, 200),
            ("GET", "/v1/models", {}, None, 401),
            ("GET", "/v1/models", known, None, 200),
            ("GET", "/nowhere", known, None, 404),
            ("GET", "/generate", known, None, 405),
            ("OPTIONS", "/generate", preflight, None, 200),
            ("POST", "/generate", known, {"text": 5}, 400),
            ("POST", "/generate", known, {"text": "a"}, 200),
            ("POST", "/generate", known, {"text": "a", "stream": True}, 200),
            ("POST", "/v1/chat/completions", known, {**CHAT, "n": 2}, 400),
            ("GET", "/metrics", known, None, 200),
        ):
            for given in (f"id-{status}", None):
                sent = headers | ({HEADER: given} if given else {})
                response = await client.request(method, path, headers=sent, json=body)
                assert response.status_code == status, response.text
                (told,) = response.headers.get_list(HEADER)
                assert told == given or (given is None and RANDOM.fullmatch(told))


async def test_a_bug_keeps_it(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    http = HttpOptions(port=0, allowed_origins=("*",))
    async with joined_router(model_folder, [], http=http, wait=False) as (router, client):
        router.model.get().tokenizer.close()  # its threads are gone: a long prompt cannot be encoded
        headers = {HEADER: "mine", "Origin": "https://page.example"}
        failed = await client.post("/tokenize", json={"prompt": "a" * 2001}, headers=headers)
        assert (failed.status_code, failed.json()["error"]["message"]) == (500, "internal error")
        assert failed.headers[HEADER] == "mine"
        assert failed.headers["access-control-allow-origin"] == "*"
    assert "request_failed path=/tokenize" in caplog.text


async def test_it_is_the_rid(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):

        async def rids(path: str, **body: object) -> list[str]:
            response = await client.post(path, json=body, headers={HEADER: "trace-7"})
            assert response.headers[HEADER] == "trace-7"
            answer = response.json()
            if path != "/generate":
                return [answer["id"]]
            return [each["meta_info"]["id"] for each in (answer if isinstance(answer, list) else [answer])]

        assert await rids("/generate", text="a") == ["trace-7"]
        assert await rids("/generate", text=["a", "b"]) == ["trace-7_0", "trace-7_1"]
        assert await rids("/generate", text="a", rid="own") == ["own"]
        assert await rids("/generate", text=["a"], rid=["own"]) == ["own"]
        assert await rids("/v1/completions", prompt="a") == ["trace-7"]
        assert await rids("/v1/completions", prompt="a", rid="own") == ["own"]
        assert await rids("/v1/chat/completions", **CHAT) == ["trace-7"]


async def test_one_that_is_not_valid_is_replaced(model_folder: Path) -> None:
    invalid = (b"two words", b"", "schlüssel".encode(), b"x" * 201, b"tab\tbed")
    async with joined_pair(model_folder) as (_, _, client):
        for given in (*([(HEADER, one)] for one in invalid), [(HEADER, "a"), (HEADER, "b")]):
            response = await client.post("/generate", json={"text": "a"}, headers=given)
            assert response.status_code == 200
            (told,) = response.headers.get_list(HEADER)
            assert RANDOM.fullmatch(told)
            assert RANDOM.fullmatch(response.json()["meta_info"]["id"])


async def test_a_retry_may_repeat_it_while_the_first_attempt_runs(model_folder: Path) -> None:
    async with joined_pair(model_folder, prefill=say_nothing, decode=say_nothing) as (nodes, _, client):

        def ask(headers: dict[str, str], **body: object) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/generate", json={"text": "a", **body}, headers=headers))

        attempts = [ask({HEADER: "same"}) for _ in range(2)]
        await nodes[1].wait_for(Decode, 2)
        # a rid in the body claims its name, whoever has it already
        claimed = await ask({}, rid="same")
        assert claimed.status_code == 400 and "'same'" in claimed.json()["error"]["message"]
        owner = ask({}, rid="owned")
        await nodes[1].wait_for(Decode, 3)
        assert (await ask({}, rid="owned")).status_code == 400
        attempts.append(ask({HEADER: "owned"}))
        await nodes[1].wait_for(Decode, 4)
        for rid in ("same", "owned"):
            aborted = await client.post("/abort_request", json={"rid": rid})
            assert aborted.json()["aborted"] == 2
        for answer in await asyncio.gather(*attempts, owner):
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        again = ask({}, rid="same")
        await nodes[1].wait_for(Decode, 5)
        assert (await client.post("/abort_request", json={"rid": "same"})).json()["aborted"] == 1
        assert (await again).status_code == 200


async def test_the_first_to_end_leaves_the_name_to_the_other(model_folder: Path) -> None:
    async def num_aborted(client: httpx.AsyncClient) -> float:
        found = re.search(r"num_aborted_requests_total{.*} (\S+)", (await client.get("/metrics")).text)
        assert found
        return float(found[1])

    async with joined_pair(model_folder, prefill=one_then_nothing, decode=one_then_nothing) as (_, _, client):
        headers, body = {HEADER: "same"}, {"text": "a", "stream": True}
        async with client.stream("POST", "/generate", json=body, headers=headers) as second:
            events = second.aiter_lines()
            assert (await anext(events)).startswith("data: ")
            async with client.stream("POST", "/generate", json=body, headers=headers) as first:
                assert (await anext(first.aiter_lines())).startswith("data: ")
            await eventually(lambda: num_aborted(client))
            assert (await client.post("/generate", json={"text": "b", "rid": "same"})).status_code == 400
            assert (await client.post("/abort_request", json={"rid": "same"})).json()["aborted"] == 1
            rest = [line async for line in events if line]
            assert '"abort"' in rest[-2] and rest[-1] == "data: [DONE]"


async def test_the_openai_client_finds_it(model_folder: Path) -> None:
    async with (
        joined_pair(model_folder) as (_, router, _),
        openai_client(router.url) as client,
    ):
        named = await client.completions.create(model="tiny", prompt="a", extra_headers={HEADER: "t-1"})
        assert (named._request_id, named.id) == ("t-1", "t-1")
        unnamed = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}]
        )
        assert RANDOM.fullmatch(unnamed._request_id or "")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="a", n=0, extra_headers={HEADER: "t-2"})
        assert caught.value.request_id == "t-2"
