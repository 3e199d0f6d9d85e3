"""What the nodes are told about the grammar of an output, for each way of asking for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.api.openai_bodies import CompletionBody
from router.api.openai_requests import format_grammar
from router.request.sampling import read_sampling
from shared.protocol.messages import Decode, Failed, Prefill
from shared.protocol.sampling_params import Grammar
from tests.unit.router.bodies import validate
from tests.unit.router.fake_node import FakeNode, say_nothing
from tests.unit.router.fakes import joined_pair

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


def grammar_of(body: dict[str, object]) -> Grammar | None:
    asked = validate(CompletionBody, {"prompt": "a", **body})
    own = format_grammar(asked.response_format)
    return read_sampling(asked, 16, 100, own_grammar=own)[0].grammar


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"regex": None, "ebnf": None, "json_schema": None, "response_format": None}, None),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"json_schema": '{"type": "array"}'}, Grammar("json_schema", '{"type": "array"}')),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "regex": "a+"}, Grammar("regex", "a+")),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}')),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "null"}}},
            Grammar("json_schema", '{"type":"null"}'),
        ),
        (
            {"response_format": {"type": "json_object", "schema": None}},
            Grammar("json_schema", '{"type": "object"}'),
        ),
    ],
    ids=str,
)
def test_each_way(body: dict[str, object], expected: Grammar | None) -> None:
    assert grammar_of(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"json_schema": SCHEMA},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
    ],
    ids=["object", "response_format"],
)
def test_a_schema_may_be_an_object(body: dict[str, object]) -> None:
    grammar = grammar_of(body)
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text) == SCHEMA


async def test_both_nodes_are_told_by_every_route(model_folder: Path) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    requests = {
        "/generate": {"text": "a", "sampling_params": {"json_schema": '{"type":"null"}'}},
        "/v1/completions": {"prompt": "a", "response_format": asked},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 3,
            "response_format": asked,
        },
    }

    async with joined_pair(model_folder) as (nodes, _, client):
        for path, body in requests.items():
            assert (await client.post(path, json=body)).status_code == 200
        told = [*nodes[0].all(Prefill), *nodes[1].all(Decode)]
        assert len(told) == 6
        assert {message.work.params.grammar for message in told} == {
            Grammar("json_schema", '{"type":"null"}')
        }


OF_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("/generate", {"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ("/generate", {"text": ["a"], "sampling_params": [{"ebnf": "x"}]}, "sampling_params[0].ebnf"),
    ("/v1/completions", {"regex": "("}, "regex"),
    ("/v1/completions", {"response_format": OF_SCHEMA}, "response_format.json_schema.schema"),
    ("/v1/completions", {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ("/v1/completions", {"response_format": {"type": "json_object"}}, "response_format"),
]
"""Requests whose grammar a node refuses, and the field that is named."""


async def test_a_nodes_error_names_the_clients_field(model_folder: Path) -> None:
    async def refuse(node: FakeNode, message: Prefill | Decode) -> None:
        grammar = message.work.params.grammar
        assert grammar is not None
        node.send(Failed(message.key, 400, f"{grammar.kind}: no such thing", grammar.kind))

    async with joined_pair(model_folder, prefill=refuse, decode=say_nothing) as (_, _, client):
        for path, body, field in REFUSED:
            answer = await client.post(path, json={"prompt": "a", **body})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["message"]) == (field, f"{field}: no such thing")
