"""`/v1/messages`, as Anthropic's clients use it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.config import HttpOptions
from shared.protocol.messages import Decode, Failed, Prefill
from tests.unit.router.fake_node import FakeNode, byte_level_tokenizer
from tests.unit.router.fakes import joined_pair, joined_router
from tests.unit.router.test_chat_tools import ARGUMENTS, AUTO, CITY, saying, tells
from tests.unit.router.test_responses_api import prompt_of

TOOLS: Any = [{"name": "weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}]
ASKED: Any = {"max_tokens": 200, "messages": [{"role": "user", "content": "Warm?"}]}


async def test_an_answer_with_thinking_text_and_a_call(hermes: Path) -> None:
    async with saying(hermes, AUTO) as (http, decode):
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        answer = (await http.post("/v1/messages", json={**ASKED, "tools": TOOLS, "system": system})).json()
        assert prompt_of(decode).endswith("<system>Be brief.<user>Warm?<assistant>")
        thinking, text, call = answer["content"]
        assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
        assert text == {"type": "text", "text": "I look."}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", json.loads(ARGUMENTS))
        assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "tool_use")
        used = answer["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == len(
            decode.all(Decode)[-1].work.input_ids
        )
        assert used["output_tokens"] > 10


async def test_a_stream(hermes: Path) -> None:
    async with saying(hermes, AUTO) as (http, _):
        body = (await http.post("/v1/messages", json={**ASKED, "tools": TOOLS, "stream": True})).text
        events = []
        for event in body.strip().split("\n\n"):
            name, data = event.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        kinds = [event["type"] for event in events]
        assert [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]] == [
            "message_start",
            *("content_block_start", "content_block_delta", "content_block_stop") * 3,
            "message_delta",
            "message_stop",
        ]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
        assert "".join(delta.get("text", "") for delta in deltas) == "I look."
        assert "".join(delta.get("partial_json", "") for delta in deltas) == ARGUMENTS
        assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] > 10


async def test_the_blocks_of_a_conversation_reach_the_template(hermes: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Warm?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": json.loads(ARGUMENTS)},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "21"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]

    async with saying(hermes, "fine") as (http, decode):
        asked = {**ASKED, "messages": messages, "stop_sequences": ["n"], "thinking": {"type": "disabled"}}
        answer = (await http.post("/v1/messages", json=asked)).json()
        prompt = f"<user>Warm?<assistant>I look.(weather {ARGUMENTS})<tool>21<user>Well?<assistant>"
        assert prompt_of(decode) == prompt
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "n")
        assert answer["content"] == [{"type": "text", "text": "fi"}]
        counted = await http.post("/v1/messages/count_tokens", json={"messages": messages})
        assert counted.json() == {"input_tokens": len(decode.all(Decode)[-1].work.input_ids)}


async def test_what_may_have_become_a_stop_comes_at_the_end(chats: Path) -> None:
    async with saying(chats, "fine") as (http, _):
        for stream in (False, True):
            asked = {**ASKED, "stop_sequences": ["ex"], "stream": stream}
            body = (await http.post("/v1/messages", json=asked)).text
            deltas = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
            told = "".join(event.get("delta", {}).get("text", "") for event in deltas)
            assert told == "fine" if stream else '"text":"fine"' in body


@pytest.mark.parametrize(
    ("text", "arguments"), [('{"city": "Zü', {"city": "Zü"}), ('{"city" 1', {"INVALID_JSON": '{"city" 1'})]
)
async def test_a_call_that_is_cut_off(chats: Path, text: str, arguments: dict[str, Any]) -> None:
    text = f'<tool_call>\n{{"name": "weather", "arguments": {text}'
    async with saying(chats, text, "length") as (http, _):
        asked = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
        answer = (await http.post("/v1/messages", json=asked)).json()
        assert answer["stop_reason"] == "max_tokens"
        assert answer["content"][0]["input"] == arguments


async def test_errors_have_their_own_form(hermes: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image"}]}]
    async with saying(hermes, "fine") as (http, _):
        for fields, status, kind, named in (
            ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
            ({"model": "other"}, 404, "not_found_error", "other"),
            ({"messages": image}, 400, "invalid_request_error", "messages[0].content[0]"),
            ({"tools": [{"type": "bash_2025", "name": "x"}]}, 400, "invalid_request_error", "tools[0].type"),
            ({"tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tool_choice"),
        ):
            refused = await http.post("/v1/messages", json={**ASKED, **fields})
            told = refused.json()
            assert (refused.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
            assert named in told["error"]["message"]


async def test_a_key_in_the_header_of_its_clients(hermes: Path) -> None:
    options = HttpOptions(port=0, served_model_name="tiny", api_keys=("red",))
    async with joined_router(hermes, [], http=options, wait=False) as (_, http):
        known, unknown = [
            await http.post("/v1/messages", json=ASKED, headers={"x-api-key": key}) for key in ("red", "blue")
        ]
        assert (known.status_code, unknown.status_code) == (503, 401)
        assert unknown.json()["error"]["type"] == "authentication_error"


async def test_a_failure_in_the_middle_of_a_stream(hermes: Path) -> None:
    async def fails(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, byte_level_tokenizer().encode("fi").ids)
        await asyncio.sleep(0.3)  # so that the stream has begun
        node.send(Failed(message.key, 400, "it broke", "seed"))

    first, _ = tells("fine")
    async with joined_pair(hermes, prefill=first, decode=fails) as (_, _, http):
        answer = await http.post("/v1/messages", json={**ASKED, "max_tokens": 9, "stream": True})
        *_, last = answer.text.strip().split("\n\n")
        name, data = last.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and told["type"] == "error" and told["error"]["message"]
        answer = await http.post("/v1/responses", json={"input": "x", "stream": True})
        *_, last = answer.text.strip().split("\n\n")
        name, data = last.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and told["message"] and told["sequence_number"] > 1
