"""Whatever is posted: no 5xx, one shape of error, no hang, and nothing that stays behind.

Bodies are right ones with one thing changed, in each of their places. They go over real sockets to a real router with
scripted nodes; afterwards, the router holds nothing and serves again. Bodies that are no JSON are in test_errors.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import HttpLimits, HttpOptions
from shared.protocol.messages import NodeLimits
from tests.patience import PATIENCE_S
from tests.unit.router.fakes import joined_pair
from tests.unit.router.scoring import scored_first_token, scored_story
from tests.unit.router.test_prompts import EVERYTHING

RID = "fuzzed"
OPENAI: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 3,
    "n": 2,
    "seed": 1,
    "stop": "fox",
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}},
    "logit_bias": {"3": -1},
    "rid": RID,
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": "a b", "sampling_params": EVERYTHING, "rid": RID, "return_timeline": True},
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "rid": RID, "stream": True},
        {
            "input_ids": [[1, 2], [3]],
            "sampling_params": [{"max_new_tokens": 2, "regex": "a+"}, {"n": 2, "max_new_tokens": 1}],
            "rid": [RID, "other"],
            "extra_key": ["x", None],
            "stream": True,
            "priority": 3,
            "routing_key": "r",
        },
        {
            "text": ["a", "b"],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": [False, None],
            "logprob_start_len": [0, -1],
            "top_logprobs_num": 2,
            "token_ids_logprob": [[1], None],
        },
    ],
    "/v1/completions": [
        {**OPENAI, "prompt": ["a", "b"], "echo": True},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "best_of": 1, "ebnf": 'root ::= "a"'},
    ],
    "/v1/chat/completions": [
        {**OPENAI, "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1}},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "content": "b", "tool_call_id": "1"},
            ],
            "max_completion_tokens": 2,
            "tools": [],
            "tool_choice": "none",
        },
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "none",
            "return_timeline": True,
            "logprobs": False,
            "top_logprobs": 0,
        },
    ],
    "/tokenize": [{"prompt": "a b", "add_special_tokens": True}, {"prompt": ["a", "b"]}],
    "/detokenize": [{"tokens": [1, 2], "skip_special_tokens": False}, {"tokens": [[1], [2]]}],
    "/abort_request": [{"rid": RID, "abort_all": False}],
    "/start_profile": [{"num_steps": 1, "with_stack": False, "record_shapes": True}],
}
GOOD = {"text": "a", "rid": RID, "sampling_params": {"max_new_tokens": 2}}

AWKWARD: list[Any] = [
    *(None, True, -1, 10**30, -(10**400), 1e308, float("nan")),
    *("a\x00\ud800", "x" * 5000, [[None]], {"a": None}),
]
CHANGES: dict[str, Callable[[Any], Any]] = {
    **{f"is {value!r:.20}": lambda _, value=value: value for value in AWKWARD},
    "is in a list": lambda value: [value],
    "comes 40 times": lambda value: value * 40 if isinstance(value, list) else [value] * 40,
    "lacks its first part": lambda value: value[1:] if isinstance(value, list | str) else {},
}
"""What becomes of the value in one place of a body."""


def changed(value: Any, change: Callable[[Any], Any]) -> Iterator[Any]:
    """`value` with the change in one of its places, for each of them."""
    for place in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for other in (change(value[place]), *changed(value[place], change)):
            copy = value.copy()
            copy[place] = other
            yield copy


async def checked_post(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    answer = await client.post(path, content=body)
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert 0 < len(error["message"]) < 1000
    elif "text/event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"status": 5' not in answer.text and "internal error" not in answer.text


@asynccontextmanager
async def fuzzed(model_folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that holds nothing, and serves again, at the end."""
    http = HttpOptions(
        port=0, served_model_name="tiny", limits=HttpLimits(max_batch_size=16, max_body_bytes=200_000)
    )
    room = NodeLimits(context_length=256, max_total_num_tokens=80, max_running_requests=8)
    scripts: dict[str, Any] = {"prefill": scored_first_token, "decode": scored_story}
    async with joined_pair(model_folder, limits=room, http=http, **scripts) as (_, router, client):
        yield client
        async with asyncio.timeout(PATIENCE_S):
            while router._dispatcher.num_running:
                await asyncio.sleep(0.001)  # a stream lets go right after its last bytes
            while (good := await client.post("/generate", json=GOOD)).status_code != 200:
                assert "is the name of another request" in good.text, good.text


@pytest.mark.parametrize("change", CHANGES)
async def test_a_body_whose_value_in_some_place(model_folder: Path, change: str) -> None:
    async with fuzzed(model_folder) as client:
        for path, bodies in BODIES.items():
            for body in bodies:
                for copy in changed(body, CHANGES[change]):
                    await checked_post(client, path, json.dumps(copy).encode())


async def test_the_bodies_they_start_from_are_right(model_folder: Path) -> None:
    async with fuzzed(model_folder) as client:
        for path, bodies in BODIES.items():
            for body in bodies:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
