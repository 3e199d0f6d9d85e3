"""Whatever is posted: no 5xx, one shape of error, no hang, and nothing that stays behind.

Bodies are right ones with one thing changed, in each of their places. They go over real sockets to a real router with
scripted nodes; afterwards, the router holds nothing and serves again. Bodies that are no JSON are in test_errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from router.http.config import DispatchOptions, HttpLimits, HttpOptions
from router.server import Router
from shared.protocol.messages import NodeLimits, Role
from tests.patience import PATIENCE_S
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import joined_router
from tests.unit.router.scoring import scored_first_token, scored_story

T = TypeVar("T")

RID = "fuzzed"
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 3,
    "min_new_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "stop": ["fox", "dog"],
    "stop_regex": "[0-9]+",
    "stop_token_ids": [7],
    "n": 2,
    "logit_bias": {"3": 1.5},
    "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "sampling_seed": 3,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
}
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
        {"text": "a b", "sampling_params": SAMPLING, "rid": RID, "return_timeline": True},
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


@dataclass
class Service:
    """A router that runs between examples too, on a loop that only turns within `run`."""

    loop: asyncio.AbstractEventLoop
    process: Router
    client: httpx.AsyncClient
    nodes: list[FakeNode]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def post(self, path: str, body: bytes) -> None:
        answer = await self.client.post(path, content=body)
        assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "code", "param"}
            assert 0 < len(error["message"]) < 1000
        elif "text/event-stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"status": 5' not in answer.text and "internal error" not in answer.text

    async def check_idle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.process._dispatcher.num_running:
                await asyncio.sleep(0.001)  # a stream lets go right after its last bytes
            while (good := await self.client.post("/generate", json=GOOD)).status_code != 200:
                assert "is the name of another request" in good.text, good.text
        for node in self.nodes:
            node.heard.clear()


@pytest.fixture(scope="module")
def service(model_folder: Path) -> Iterator[Service]:
    limits = HttpLimits(max_batch_size=16, max_body_bytes=200_000)
    room = NodeLimits(context_length=256, max_total_num_tokens=80, max_running_requests=8)
    loop = asyncio.new_event_loop()

    async def enter(exits: contextlib.AsyncExitStack) -> Service:
        scripts = {Role.PREFILL: scored_first_token, Role.DECODE: scored_story}
        nodes = [
            await exits.enter_async_context(FakeNode(role, limits=room, script=scripts[role]))
            for role in Role
        ]
        process, client = await exits.enter_async_context(
            joined_router(
                model_folder,
                nodes,
                http=HttpOptions(port=0, served_model_name="tiny", limits=limits),
                dispatch=DispatchOptions(local_prefill_tokens=0),
            )
        )
        return Service(loop, process, client, nodes)

    exits = contextlib.AsyncExitStack()
    try:
        yield loop.run_until_complete(enter(exits))
    finally:
        loop.run_until_complete(exits.aclose())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_body_whose_value_in_some_place(service: Service, change: str) -> None:
    for path, bodies in BODIES.items():
        for body in bodies:
            for copy in changed(body, CHANGES[change]):
                service.run(service.post(path, json.dumps(copy).encode()))
    service.run(service.check_idle())


@pytest.mark.parametrize("path", sorted(BODIES))
def test_the_bodies_they_start_from_are_right(service: Service, path: str) -> None:
    for body in BODIES[path]:
        answer = service.run(service.client.post(path, json=body))
        assert answer.status_code == 200, answer.text
