"""Tools in a chat, by OpenAI's own client: what reaches the model, and how a forced call comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.protocol.messages import Decode, Finish, NodeLimits, Prefill, Tokens
from tests.unit.router.fake_node import FakeNode, Script, byte_level_tokenizer
from tests.unit.router.fakes import HERMES, joined_pair, openai_client, write_model
from tests.unit.router.scoring import entry
from tests.unit.router.test_reply_parser import OWN_TEMPLATE

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
QUESTION: Any = [{"role": "user", "content": "Warm?"}]
ARGUMENTS = '{"city": "Zürich {}}"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"


def tells(text: str, finish: str = "stop") -> tuple[Script, Script]:
    """Scripts that say this text, token by token."""
    ids = byte_level_tokenizer().encode(text).ids

    def say(node: FakeNode, message: Prefill | Decode, position: int, end: Finish | None = None) -> None:
        if message.work.params.logprobs is None:
            node.tokens(message.key, position, ids[position : position + 1], end)
        else:
            node.story = ids
            node.send(Tokens((entry(node, message, position, end),)))

    async def first(node: FakeNode, message: Prefill | Decode) -> None:
        say(node, message, 0)

    async def rest(node: FakeNode, message: Prefill | Decode) -> None:
        for position in range(len(ids)):
            await asyncio.sleep(0.001)  # so that it comes in pieces
            end = Finish(finish) if position == len(ids) - 1 else None
            say(node, message, position, end)

    return first, rest


@contextlib.asynccontextmanager
async def saying(
    folder: Path, text: str, finish: str = "stop"
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeNode]]:
    """A client, and the decode node that says this text."""
    first, rest = tells(text, finish)
    limits = NodeLimits(context_length=1024, max_total_num_tokens=1024, max_running_requests=8)
    async with joined_pair(folder, prefill=first, decode=rest, limits=limits) as (nodes, _, client):
        yield client, nodes[1]


@contextlib.asynccontextmanager
async def with_client(
    folder: Path, text: str, finish: str = "stop"
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeNode]]:
    """OpenAI's own client, and the decode node."""
    async with saying(folder, text, finish) as (http, decode), openai_client(http.base_url) as client:
        yield client, decode


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    """The choices of an answer to QUESTION with TOOLS."""
    asked: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, **fields}
    return list((await client.chat.completions.create(**asked)).choices)


async def ask_for_stream(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    """The choice of each event of a stream."""
    asked: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "stream": True, **fields}
    return [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked)]


def calls_in(message: Any) -> list[tuple[str, str]]:
    """The names and arguments of the calls of a message."""
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def call_deltas(choices: list[Any]) -> list[Any]:
    return [delta for choice in choices for delta in choice.delta.tool_calls or ()]


async def test_the_format_of_text_is_not_that_of_a_call(chats: Path) -> None:
    of_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    async with with_client(chats, TAGGED) as (client, decode):
        for choice, form in itertools.product((WEATHER, "required"), ({"type": "json_object"}, of_schema)):
            await ask(client, tool_choice=choice, response_format=form)
            await ask(client, tool_choice=choice)
            await ask(client, tool_choice="none", response_format=form)
            both, call, text = (message.work.params.grammar for message in decode.all(Decode)[-3:])
            assert both == call
            assert text is not None and text != call


@pytest.mark.parametrize(("choice", "finish_reason"), [(WEATHER, "stop"), ("required", "tool_calls")])
async def test_a_forced_call(chats: Path, choice: Any, finish_reason: str) -> None:
    """A model of no family is made to call as hermes does."""
    async with with_client(chats, TAGGED) as (client, decode):
        choices = await ask(client, tool_choice=choice, n=2)
        for answered in choices:
            assert answered.finish_reason == finish_reason and answered.message.content is None
            assert calls_in(answered.message) == [("weather", ARGUMENTS)]
            assert answered.message.tool_calls[0].type == "function"
        assert len({answered.message.tool_calls[0].id for answered in choices}) == 2
        grammar = decode.all(Decode)[0].work.params.grammar
        assert grammar is not None and grammar.kind == "calls"
        functions = [tool["function"] for tool in json.loads(grammar.text)["tools"]]
        assert functions[0] == {"name": "weather", "parameters": CITY, "strict": True}
        assert len(functions) == (1 if choice == WEATHER else 2)
        assert not json.loads(grammar.text)["parallel"], "it might go on with calls for ever"
        streamed = await ask_for_stream(client, tool_choice=choice, logprobs=True)
        assert streamed[0].delta.role == "assistant"
        assert all(one.delta.tool_calls for one in streamed[1:-1]), "it begins with its name"
        assert not any(one.logprobs.content for one in streamed if one.logprobs), "a call is no content"
        assert not any(one.delta.content for one in streamed)
        deltas = call_deltas(streamed)
        assert {delta.index for delta in deltas} == {0}
        assert deltas[0].id and deltas[0].function.name == "weather"
        assert all(delta.id is None for delta in deltas[1:])
        assert "".join(delta.function.arguments or "" for delta in deltas) == ARGUMENTS
        assert streamed[-1].finish_reason == finish_reason


async def test_a_call_that_is_cut_off(chats: Path) -> None:
    async with with_client(chats, '<tool_call>\n{"name": "wea', finish="length") as (client, _):
        (answered,) = await ask(client, tool_choice="required")
        assert answered.finish_reason == "length"
        assert answered.message.tool_calls is None and not answered.message.content
        opening, last = await ask_for_stream(client, tool_choice="required")
        assert opening.delta.role == "assistant" and opening.finish_reason is None
        assert last.delta.content is None and last.delta.tool_calls is None
        assert last.finish_reason == "length"


async def test_what_the_template_sees(chats: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "War"}, {"type": "text", "text": "m?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "21 °C"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "assistant", "content": "Yes", "tool_calls": []},
    ]
    past = f"<system>Be brief.<user>Warm?<assistant>(weather {ARGUMENTS})<tool>21 °C"
    past += f"<assistant>Hm.(weather {ARGUMENTS})<assistant>Wait.(weather {ARGUMENTS})<assistant>Yes"
    shown = '[{"name": "weather", "parameters": ' + json.dumps(CITY) + '}][{"name": "now"}]'

    async with with_client(chats, "fine") as (client, decode):
        for options, prompt in (
            ({}, f"{past}<assistant>"),
            ({"tools": TOOLS, "tool_choice": "none"}, f"{shown}{past}<assistant>"),
            ({"extra_body": {"continue_final_message": True}}, past),
            ({"extra_body": {"add_generation_prompt": False}}, past),
            ({"user": "me", "metadata": {"a": "b"}, "store": False}, f"{past}<assistant>"),
        ):
            asked: dict[str, Any] = {"messages": messages, **options}
            answered = (await client.chat.completions.create(model="tiny", **asked)).choices[0]
            assert answered.message.content == "fine" and answered.message.tool_calls is None
            sent = decode.all(Decode)[-1]
            assert byte_level_tokenizer().decode(list(sent.work.input_ids)) == prompt
            assert sent.work.params.grammar is None


AUTO = f"<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>"


async def test_a_call_that_the_model_decides_on(hermes: Path) -> None:
    async with with_client(hermes, AUTO) as (client, decode):
        for choice in ({}, {"tool_choice": "auto"}):
            (answered,) = await ask(client, **choice)
            assert answered.finish_reason == "tool_calls"
            assert answered.message.content == "I look."
            assert answered.message.model_extra == {"reasoning_content": "hm", "reasoning": "hm"}
            assert calls_in(answered.message) == [("weather", ARGUMENTS)]
        assert decode.all(Decode)[0].work.params.grammar is None
        asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS}
        async with client.chat.completions.stream(**asked) as stream:
            told = (await stream.get_final_completion()).choices[0]
        assert told.message.content == "I look." and told.finish_reason == "tool_calls"
        assert calls_in(told.message) == [("weather", ARGUMENTS)]
        deltas = call_deltas(await ask_for_stream(client))
        assert deltas[0].id and len(deltas) > 5, "arguments come piece by piece"


async def test_what_is_told_apart(hermes: Path) -> None:
    async with with_client(hermes, AUTO) as (client, _):
        for fields, content, reasoning in (
            ({"tool_choice": "none"}, f"I look.\n<tool_call>\n{CALL}\n</tool_call>", "hm"),
            ({"extra_body": {"include_reasoning": False}}, "I look.", None),
            ({"extra_body": {"separate_reasoning": False}}, "<think>\nhm\n</think>\n\nI look.", None),
            ({"reasoning_effort": "none"}, "I look.", "hm"),
        ):
            message = (await ask(client, **fields))[0].message
            assert message.content == content
            assert (message.model_extra or {}).get("reasoning_content") == reasoning
            assert (message.tool_calls is None) == ("tool_choice" in fields)


async def test_calls_of_an_unknown_family_are_text(chats: Path) -> None:
    async with with_client(chats, AUTO) as (client, _):
        (answered,) = await ask(client)
        assert (answered.message.content, answered.finish_reason) == (AUTO, "stop")


async def test_tokens_of_reasoning_are_counted_and_logprobs_are_those_of_content(hermes: Path) -> None:
    async with with_client(hermes, AUTO) as (client, _):
        asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "logprobs": True}
        whole = await client.chat.completions.create(**asked)
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(**asked, stream=True, stream_options=options)
        *chunks, last = [chunk async for chunk in stream]
        told = [whole.choices[0].logprobs, *(chunk.choices[0].logprobs for chunk in chunks)]
        texts = ["".join(token.token for token in one.content or ()) if one else "" for one in told]
        assert texts[0].strip() == "I look." and "".join(texts[1:]) == texts[0]
        text, num_reasoning = "", 0
        for token_id in byte_level_tokenizer().encode(AUTO).ids:
            num_reasoning += "</think>" not in text
            text += byte_level_tokenizer().decode([token_id])
        for usage in (whole.usage, last.usage):
            assert usage is not None and usage.completion_tokens_details is not None
            assert usage.completion_tokens_details.reasoning_tokens == num_reasoning


@pytest.mark.parametrize("parallel", [True, False])
async def test_calls_behind_the_first(hermes: Path, parallel: bool) -> None:
    async with with_client(hermes, f"<tool_call>{CALL}</tool_call>" * 2) as (client, _):
        (answered,) = await ask(client, parallel_tool_calls=parallel)
        named = {
            delta.index for delta in call_deltas(await ask_for_stream(client, parallel_tool_calls=parallel))
        }
        assert len(calls_in(answered.message)) == len(named) == (2 if parallel else 1)


async def test_some_tools_may_be_allowed(chats: Path) -> None:
    def allowed(mode: str, name: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    async with with_client(chats, '{"name": "now", "arguments": {}}') as (client, decode):
        await ask(client, tool_choice=allowed("required", "now"))
        grammar = decode.all(Decode)[-1].work.params.grammar
        assert grammar is not None and '"now"' in grammar.text and '"weather"' not in grammar.text
        for mode in ("auto", "required"):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await ask(client, tool_choice=allowed(mode, "x"))


async def test_no_bound_may_be_said_as_minus_one(chats: Path) -> None:
    async with with_client(chats, "fine") as (client, decode):
        lengths = []
        for bound in ({}, {"max_tokens": -1}, {"max_completion_tokens": -1}):
            await client.chat.completions.create(model="tiny", messages=QUESTION, **bound)
            lengths.append(decode.all(Decode)[-1].work.params.max_new_tokens)
        assert len(set(lengths)) == 1


async def test_the_checkpoints_own_template_comes_first(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "own", chat_template=HERMES)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "response_template": OWN_TEMPLATE}
    path.write_text(json.dumps(config))

    async with with_client(folder, '<hm>so</hm>I look.<call get>{"n": 3}</call>') as (client, _):
        (answered,) = await ask(client)
        assert answered.message.content == "I look."
        assert answered.message.model_extra == {"reasoning_content": "so", "reasoning": "so"}
        assert calls_in(answered.message) == [("get", '{"n": 3}')]
        info = await client.get("/../server_info", cast_to=httpx.Response)
        assert info.json()["tool_call_parser"] == "response_template"
