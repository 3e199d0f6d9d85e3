"""Priority and routing key reach both nodes, from body and header, through both APIs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from router.api.generate_api import GenerateBody
from router.api.openai_bodies import ChatBody, CompletionBody
from router.http.body import Body
from router.request.prompt import read_routing_key
from shared.errors import RequestError
from shared.protocol.messages import Decode, Prefill
from tests.unit.router.bodies import validate
from tests.unit.router.fakes import joined_pair

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": ["a b c", "d"]},
    "/v1/completions": {"prompt": ["a b c", "d"]},
    "/v1/chat/completions": CHAT,
}


async def test_they_reach_both_nodes(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (nodes, _, http):
        for (path, body), way in itertools.product(BODIES.items(), ("body", "header")):
            for node in nodes:
                node.heard.clear()
            headers = {"X-SMG-Routing-Key": "red"} if way == "header" else {}
            key = {"routing_key": "red"} if way == "body" else {}
            answer = await http.post(path, json={**body, "priority": -7, **key}, headers=headers)
            assert answer.status_code == 200
            num_prompts = 1 if body is CHAT else 2
            await nodes[0].wait_for(Prefill, num_prompts)  # which may be late: the decode node needs it not
            sent = [*nodes[0].all(Prefill), *nodes[1].all(Decode)]
            assert len(sent) == 2 * num_prompts
            assert {(message.work.priority, message.work.routing_key) for message in sent} == {(-7, "red")}
            await http.post(path, json=body)
            await nodes[0].wait_for(Prefill, 2 * num_prompts)
            last = nodes[1].all(Decode)[-1].work
            assert (last.priority, last.routing_key) == (0, "")


def test_the_body_counts_before_the_header() -> None:
    headers = {"x-smg-routing-key": "blue"}
    assert read_routing_key("red", headers) == "red"
    assert read_routing_key("", headers) == ""
    assert read_routing_key(None, headers) == "blue"
    assert read_routing_key(None, {}) == ""


def test_a_header_is_bounded_too() -> None:
    with pytest.raises(RequestError, match=r"routing_key .*256"):
        read_routing_key(None, {"x-smg-routing-key": "x" * 257})


@pytest.mark.parametrize("kind", [GenerateBody, CompletionBody, ChatBody])
@pytest.mark.parametrize("priority", [-1000, 1000])
def test_the_bounds_of_a_priority_are_taken(kind: type[Body], priority: int) -> None:
    needed = {"prompt": "a", **CHAT}
    assert validate(kind, {**needed, "priority": priority}).priority == priority  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="priority"):
        validate(kind, {**needed, "priority": priority * 1001 // 1000})
