"""anthropic: its own client against `/v1/messages`."""

from __future__ import annotations

import asyncio

import anthropic
from checks import KEY, KEYED_URL, MODEL, SCRIPTED, SCRIPTED_URL, URL, check, main, raises

client = anthropic.Anthropic(base_url=SCRIPTED_URL, api_key="none", max_retries=0)
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOLS = [
    {"name": "add", "description": "Adds.", "input_schema": NUMBERS},
    {"name": "multiply", "description": "Multiplies.", "input_schema": NUMBERS},
]
DO = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
ASKED = {"model": SCRIPTED, "max_tokens": 500, "tools": TOOLS}
QUESTION = "What is (2 + 3) * 4?"


@check
def a_loop_with_two_tools() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    called = []
    while (answer := client.messages.create(**ASKED, messages=messages)).stop_reason == "tool_use":
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert answer.content[0].type == "thinking"
        called += [(use.name, use.input) for use in uses]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": str(DO[use.name](**use.input))}
            for use in uses
        ]
        messages.append({"role": "user", "content": results})
    assert called == [("add", {"a": 2, "b": 3}), ("multiply", {"a": 5, "b": 4})]
    assert answer.content[-1].text == "It is 20." and answer.stop_reason == "end_turn"


@check
def a_stream_adds_up() -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": QUESTION}]}
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_message()
    assert {"message_start", "content_block_start", "content_block_delta", "message_stop"} <= kinds
    assert [block.type for block in whole.content] == ["thinking", "tool_use"]
    assert whole.content[0].thinking == "I add first." and whole.content[1].input == {"a": 2, "b": 3}
    assert whole.usage.output_tokens > 10


@check
async def async_calls() -> None:
    many = anthropic.AsyncAnthropic(base_url=SCRIPTED_URL, api_key="none", max_retries=0)
    asked = {"model": SCRIPTED, "max_tokens": 50, "messages": [{"role": "user", "content": "Hello?"}]}
    answers = await asyncio.gather(*(many.messages.create(**asked) for _ in range(4)))
    assert {answer.content[0].text for answer in answers} == {"Hello from the script."}


@check
def tokens_are_counted() -> None:
    asked = {"model": SCRIPTED, "messages": [{"role": "user", "content": QUESTION}], "system": "Be brief."}
    counted = client.messages.count_tokens(**asked)
    used = client.messages.create(**asked, max_tokens=500).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


@check
def errors_keep_their_types_and_the_key_is_its_own() -> None:
    raises(anthropic.BadRequestError, lambda: client.messages.create(**{**ASKED, "messages": []}))
    asked = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "def f(x):"}]}
    unknown = anthropic.Anthropic(base_url=KEYED_URL, api_key="wrong", max_retries=0)
    raises(anthropic.AuthenticationError, lambda: unknown.messages.create(**asked))
    known = anthropic.Anthropic(base_url=KEYED_URL, api_key=KEY, max_retries=0)
    assert known.messages.create(**asked).stop_reason == "max_tokens"
    split = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    assert split.messages.create(**asked).usage.output_tokens == 4


if __name__ == "__main__":
    main()
