"""The OpenAPI document says of every route what is true: its answers have the described shapes, and no others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from router.config import HttpOptions
from tests.unit.router.fakes import events, joined_pair
from tests.unit.router.scoring import scored_first_token, scored_story

JUDGED = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5]}
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"messages": HI, "max_tokens": 9}
FORCED = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
ANY_CALL = {**ASKED, "tools": TOOLS, "tool_choice": "required", "stream": True}
CALLS: list[tuple[str, str, dict[str, Any] | None, int]] = [
    ("POST", "/generate", {"text": "hi"}, 200),
    ("PUT", "/generate", {"text": ["hi", "you"], "sampling_params": {"n": 2}}, 200),
    ("POST", "/generate", {"text": "hi", "stream": True, "return_timeline": True}, 200),
    ("POST", "/generate", {"input_ids": [[1, 2], [3]], "stream": True}, 200),
    ("POST", "/generate", {"text": ["hello", "you"], **JUDGED}, 200),
    ("POST", "/generate", {"text": "hello", "stream": True, "return_text_in_logprobs": True, **JUDGED}, 200),
    ("POST", "/generate", {"text": 5}, 400),
    ("POST", COMPLETIONS, {"prompt": "hi", "n": 2, "best_of": 3}, 200),
    ("POST", COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "return_timeline": True}, 200),
    ("POST", COMPLETIONS, {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}, 200),
    ("POST", COMPLETIONS, {"prompt": "hi", "model": "gpt-9"}, 404),
    ("POST", COMPLETIONS, {"prompt": "hi", "n": 0}, 400),
    ("POST", CHAT, {"messages": HI}, 200),
    ("POST", CHAT, FORCED, 200),
    ("POST", CHAT, ANY_CALL, 200),
    ("POST", CHAT, {**ASKED, "stream": True, "stream_options": {"continuous_usage_stats": True}}, 200),
    ("POST", CHAT, {**ASKED, "logprobs": True, "top_logprobs": 2}, 200),
    ("POST", CHAT, {"messages": []}, 400),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 9}, 200),
    ("POST", "/v1/responses", {"input": []}, 400),
    ("POST", "/v1/messages", {"messages": HI, "max_tokens": 9}, 200),
    ("POST", "/v1/messages", {"messages": []}, 400),
    ("POST", "/v1/messages/count_tokens", {"messages": HI}, 200),
    ("GET", "/v1/models", None, 200),
    ("GET", "/v1/models/tiny", None, 200),
    ("GET", "/v1/models/gpt-9", None, 404),
    ("GET", "/health", None, 200),
    ("GET", "/health_generate", None, 200),
    ("GET", "/model_info", None, 200),
    ("GET", "/get_model_info", None, 200),
    ("GET", "/server_info", None, 200),
    ("GET", "/get_server_info", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/live/state", None, 200),
    ("POST", "/tokenize", {"prompt": "hi"}, 200),
    ("POST", "/tokenize", {"prompt": ["hi", "you"]}, 200),
    ("POST", "/detokenize", {"tokens": [1, 2]}, 200),
    ("POST", "/detokenize", {"tokens": [[1, 2], [3]]}, 200),
    ("POST", "/detokenize", {"tokens": "hi"}, 400),
    ("GET", "/flush_cache", None, 200),
    ("POST", "/flush_cache", None, 200),
    ("GET", "/flush_cache?timeout=-1", None, 400),
    ("POST", "/flush_cache?timeout=soon", None, 400),
    ("POST", "/abort_request", {"abort_all": True}, 200),
    ("POST", "/abort_request", {}, 400),
    ("POST", "/start_profile", {"num_steps": 2}, 200),
    ("POST", "/stop_profile", None, 200),
    ("GET", "/fleet", None, 200),
    ("POST", "/fleet/nodes", {"role": "prefill"}, 400),
    ("POST", "/fleet/nodes/unknown/role", {"role": "prefill"}, 404),
    ("POST", "/fleet/nodes/decode-0/role", {"role": "decode"}, 200),
    ("DELETE", "/fleet/nodes/nobody", None, 404),
    ("DELETE", "/fleet/nodes/nobody?drain_timeout_s=-1", None, 400),
]


class Described:
    """The OpenAPI document of a router, to hold answers against."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def operations(self) -> list[tuple[str, str]]:
        return [(m.upper(), path) for path, methods in self.document["paths"].items() for m in methods]

    def operation(self, method: str, path: str) -> dict[str, Any]:
        return self.document["paths"][path][method.lower()]

    def events(self, method: str, path: str) -> dict[str, Any]:
        content = self.operation(method, path)["responses"]["200"]["content"]
        data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        assert data[0] == {"const": "[DONE]"}
        return data[1]["contentSchema"]

    def fits(self, schema: dict[str, Any], value: object) -> None:
        whole = {"allOf": [schema], "components": self.document["components"]}
        jsonschema_rs.validator_for(whole).validate(value)

    def check_body(self, method: str, path: str, body: object) -> None:
        content = self.operation(method, path)["requestBody"]["content"]["application/json"]
        self.fits(content["schema"], body)

    def check(self, method: str, path: str, response: httpx.Response) -> None:
        """The status is one of the route's, and the answer, or each event of a stream, has its shape."""
        described = self.operation(method, path)["responses"]
        status = str(response.status_code)
        content = (described.get(status) or described[f"{status[0]}XX"])["content"]
        media_type = response.headers["content-type"]
        media = content.get(media_type) or content[media_type.partition(";")[0]]
        if media_type.startswith("text/event-stream"):
            *told, done = events(response.text)
            assert told and done == "[DONE]"
            for event in told:
                assert "error" not in event
                self.fits(self.events(method, path), event)
        elif media_type == "application/json":
            self.fits(media["schema"], response.json())
        else:
            assert media["schema"] == {"type": "string"}


@asynccontextmanager
async def described(model_folder: Path, key: str = "") -> AsyncIterator[tuple[Described, httpx.AsyncClient]]:
    options = HttpOptions(port=0, served_model_name="tiny", api_keys=(key,) if key else ())
    scripts = {"prefill": scored_first_token, "decode": scored_story}
    async with joined_pair(model_folder, **scripts, http=options, wait=not key) as (_, _, client):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        yield Described((await client.get("/openapi.json", headers=headers)).json()), client


def template(path: str) -> str:
    path = path.partition("?")[0]
    for folder, name in (("/v1/models/", "model_id"), ("/fleet/nodes/", "node_id")):
        if path.startswith(folder):
            return f"{folder}{{{name}}}" + ("/role" if path.endswith("/role") else "")
    return path


async def test_answers_have_the_described_shapes(model_folder: Path) -> None:
    async with described(model_folder) as (document, client):
        for method, path, body, status in CALLS:
            response = await client.request(method, path, json=body)
            assert response.status_code == status, (method, path, body, response.text)
            document.check(method, template(path), response)
            if body is not None and status == 200:
                document.check_body(method, template(path), body)
        async with client.stream("GET", "/live") as feed:  # it has no end
            first = await anext(line async for line in feed.aiter_lines() if line.startswith("data: "))
        document.fits(document.events("GET", "/live"), json.loads(first.removeprefix("data: ")))
        called = {(method, template(path)) for method, path, *_ in CALLS} | {("GET", "/live")}
        assert called == set(document.operations())


def references(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return own.union(*map(references, value.values()))


async def test_the_document_is_whole(model_folder: Path) -> None:
    async with described(model_folder) as (document, client):
        schemas = document.document["components"]["schemas"]
        referred = references(document.document)
        assert referred == {f"#/components/schemas/{name}" for name in schemas}
        for schema in schemas.values():
            jsonschema_rs.validator_for({"components": document.document["components"], **schema})
        for method, path in document.operations():
            operation = document.operation(method, path)
            assert operation["summary"] and operation["tags"] and operation["operationId"]
            assert "security" not in operation
            for status, response in operation["responses"].items():
                assert response["description"]
                media = response["content"].get("application/json", {})
                assert media.get("schema") or status == "200"
                assert status != "422"
                if "example" in media:
                    document.fits(media["schema"], media["example"])
        for page in ("/docs", "/redoc"):  # FastAPI's load scripts from elsewhere
            assert (await client.get(page)).status_code == 404


async def test_an_answer_that_is_not_described_is_noticed(model_folder: Path) -> None:
    async with described(model_folder) as (document, client):
        card = (await client.get("/v1/models/tiny")).json()
        schema = document.operation("GET", "/v1/models/{model_id}")["responses"]["200"]["content"]
        schema = schema["application/json"]["schema"]
        document.fits(schema, card)
        for wrong in (card | {"new": 1}, card | {"id": 5}, {k: v for k, v in card.items() if k != "root"}):
            with pytest.raises(jsonschema_rs.ValidationError):
                document.fits(schema, wrong)


async def test_keys_are_described_where_there_are_some(model_folder: Path) -> None:
    async with described(model_folder, key="secret") as (document, client):
        scheme = {"key": {"type": "http", "scheme": "bearer"}}
        assert document.document["components"]["securitySchemes"] == scheme
        for method, path in document.operations():
            expected = [] if path == "/health" else [{"key": []}]
            assert document.operation(method, path)["security"] == expected
        refused = await client.get("/v1/models")
        assert refused.status_code == 401
        document.check("GET", "/v1/models", refused)
