"""What the nodes are told about the grammar of an output, for each way of asking for one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from router.fields import Fields
from router.grammars import read_grammar
from shared.protocol.messages import Decode, Prefill
from shared.protocol.sampling_params import Grammar
from tests.unit.router.fakes import joined_router, pair

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


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
    ],
    ids=str,
)
def test_each_way(body: dict[str, object], expected: Grammar | None) -> None:
    assert read_grammar(Fields(body), with_response_format=True) == expected


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
    grammar = read_grammar(Fields(body), with_response_format=True)
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text) == SCHEMA


def test_both_nodes_are_told_by_every_route(model_folder: Path) -> None:
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

    async def run() -> None:
        async with pair() as nodes, joined_router(model_folder, list(nodes)) as (_, client):
            for path, body in requests.items():
                assert (await client.post(path, json=body)).status_code == 200
            told = [*nodes[0].all(Prefill), *nodes[1].all(Decode)]
            assert len(told) == 6
            assert {message.params.grammar for message in told} == {Grammar("json_schema", '{"type":"null"}')}

    asyncio.run(run())
