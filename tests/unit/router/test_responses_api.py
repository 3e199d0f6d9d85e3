"""`/v1/responses`, by OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.protocol.messages import Decode
from tests.unit.router.fake_node import FakeNode, byte_level_tokenizer
from tests.unit.router.test_chat_tools import ARGUMENTS, AUTO, CITY, with_client

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]


def prompt_of(decode: FakeNode) -> str:
    return byte_level_tokenizer().decode(list(decode.all(Decode)[-1].work.input_ids))


async def test_an_answer_with_reasoning_text_and_a_call(hermes: Path) -> None:
    async with with_client(hermes, AUTO) as (client, decode):
        answer = await client.responses.create(
            model="tiny",
            input="Warm?",
            tools=TOOLS,
            instructions="Be brief.",
            metadata={"a": "b"},
            store=True,
        )
        assert answer.metadata == {"a": "b"} and answer.instructions == "Be brief." and answer.store is False
        assert prompt_of(decode).endswith("<system>Be brief.<user>Warm?<assistant>")
        reasoning, message, call = answer.output
        assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == "hm"
        assert message.type == "message" and answer.output_text == "I look."
        assert call.type == "function_call" and (call.name, call.arguments) == ("weather", ARGUMENTS)
        assert answer.status == "completed" and answer.usage is not None
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


async def test_a_stream_has_the_events_that_its_client_checks(hermes: Path) -> None:
    async with with_client(hermes, AUTO) as (client, _):
        stream = await client.responses.create(model="tiny", input="Warm?", tools=TOOLS, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        kinds = [event.type for event in events]
        told = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]

        def item(words: str) -> list[str]:
            part = [] if words == "function_call_arguments" else ["response.content_part.added"]
            ends = [] if words == "function_call_arguments" else ["response.content_part.done"]
            own = [f"response.{words}.delta", f"response.{words}.done"]
            return ["response.output_item.added", *part, *own, *ends, "response.output_item.done"]

        assert told == [
            "response.created",
            "response.in_progress",
            *item("reasoning_text"),
            *item("output_text"),
            *item("function_call_arguments"),
            "response.completed",
        ]
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == ARGUMENTS and len(pieces) > 5
        async with client.responses.stream(model="tiny", input="Warm?", tools=TOOLS) as helper:
            answer = await helper.get_final_response()
        assert answer.output_text == "I look." and answer.output[-1].type == "function_call"


async def test_the_items_of_a_conversation_reach_the_template(hermes: Path) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Warm?"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "b", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "21"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
    ]

    async with with_client(hermes, "fine") as (client, decode):
        await client.responses.create(model="tiny", input=items, max_output_tokens=9, temperature=0.5)
        past = f"<assistant>hm(weather {ARGUMENTS})(now {{}})<tool>21<tool>noon"
        assert prompt_of(decode) == f"<system>Be brief.<user>Warm?{past}<assistant>"
        params = decode.all(Decode)[-1].work.params
        assert (params.max_new_tokens, params.temperature) == (9, 0.5)


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_how_it_ends(hermes: Path, finish: str) -> None:
    async with with_client(hermes, "fine", finish) as (client, _):
        answer = await client.responses.create(model="tiny", input="Warm?")
        assert answer.status == {"stop": "completed", "length": "incomplete"}[finish]
        assert answer.output_text == "fine" and answer.output[0].status == answer.status
        events = [
            event async for event in await client.responses.create(model="tiny", input="Warm?", stream=True)
        ]
        (done,) = [event for event in events if event.type == "response.output_item.done"]
        assert done.item.status == answer.status
        why = answer.incomplete_details and answer.incomplete_details.reason
        assert why == (None if finish == "stop" else "max_output_tokens")


NOT_SERVED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"text": {"format": {"type": "json_schema"}}}, "schema"),
    ({"top_p": 9.0}, "top_p"),
]


async def test_what_is_not_served_is_named(hermes: Path) -> None:
    async with with_client(hermes, "fine") as (client, _):
        for fields, named in NOT_SERVED:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.post("/responses", body={"input": "Warm?", **fields}, cast_to=httpx.Response)
            assert named in refused.value.message
