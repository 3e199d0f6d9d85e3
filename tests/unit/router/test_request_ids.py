"""x-request-id on every answer, and as the rid of a request."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from router.config import DispatchOptions, HttpOptions
from shared.protocol.messages import Decode
from tests.unit.router.fake_node import say_nothing
from tests.unit.router.fakes import joined_pair, joined_router

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
        body = {"text": "a"}
        attempts = [
            asyncio.create_task(client.post("/generate", json=body, headers={HEADER: "same"})) for _ in "ab"
        ]
        await nodes[1].wait_for(Decode, 2)
        claimed = await client.post("/generate", json={**body, "rid": "same"})
        assert (claimed.status_code, claimed.json()["error"]["param"]) == (400, "rid"), "it is in use already"
        aborted = await client.post("/abort_request", json={"rid": "same"})
        assert aborted.json()["aborted"] == 2
        for answer in await asyncio.gather(*attempts):
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
