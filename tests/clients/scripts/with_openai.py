"""The official `openai` client, used as its README says, against a router."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
from checks import (
    KEY,
    KEYED_URL,
    MESSAGES,
    MODEL,
    PROMPT,
    SCRIPTED,
    SCRIPTED_URL,
    URL,
    check,
    get,
    main,
    metric,
    raises,
    wait_for_aborts,
    wait_until,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

ABORTS = "sglang:num_aborted_requests_total"
LONG = 1500
"""Tokens of a request that is given up long before its end."""

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
greedy = {"model": MODEL, "temperature": 0, "max_tokens": 24}
endless = {**greedy, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}


def aio(**options: object) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, **options)


@check
def models_are_listed_and_found() -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def a_stream_is_the_whole_completion_in_pieces() -> None:
    whole = client.completions.create(prompt=PROMPT, **greedy)
    assert whole.usage.completion_tokens == 24 and whole.choices[0].finish_reason == "length"
    pieces = list(client.completions.create(prompt=PROMPT, stream=True, **greedy))
    assert len(pieces) > 4, "one piece is no stream"
    assert "".join(p.choices[0].text for p in pieces) == whole.choices[0].text != ""
    assert pieces[-1].choices[0].finish_reason == "length"


@check
def a_stream_is_the_whole_chat_in_pieces() -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **greedy)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **greedy))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content != ""
    assert all(c.usage is None for c in chunks)


@check
def usage_comes_last_when_asked_for() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(messages=MESSAGES, **options, **greedy)
    assert not last.choices
    assert last.usage.completion_tokens == 24
    whole = client.chat.completions.create(messages=MESSAGES, **greedy)
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens > 0, "the prompt was served before"


@check
async def async_streams() -> None:
    whole = client.completions.create(prompt=PROMPT, **greedy).choices[0].text
    async with aio() as one:
        stream = await one.completions.create(prompt=PROMPT, stream=True, **greedy)
        assert "".join([piece.choices[0].text async for piece in stream]) == whole


@check
def the_stream_helper_collects_events() -> None:
    one_line = {**greedy, "stop": "\n"}  # the helper takes a text that was cut for an error
    whole = client.chat.completions.create(messages=MESSAGES, **one_line)
    with client.chat.completions.stream(messages=MESSAGES, **one_line) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content


@check
def chat_logprobs_are_sorted_and_sum_to_at_most_one() -> None:
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **greedy)
    content = answer.choices[0].logprobs.content
    assert len(content) == 24
    for token in content:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert token.logprob == tops[0], "greedy takes the likeliest"
    assert b"".join(bytes(t.bytes) for t in content).decode() == answer.choices[0].message.content


@check
def echo_gives_the_prompts_logprobs() -> None:
    answer = client.completions.create(prompt=PROMPT, echo=True, logprobs=2, **{**greedy, "max_tokens": 0})
    choice = answer.choices[0]
    assert choice.text == PROMPT == "".join(choice.logprobs.tokens)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


class Verdict(BaseModel):
    """All values bounded: so small a model would write on for ever."""

    language: Literal["python", "c", "rust"]
    lines: int = Field(ge=1, le=99)
    tested: bool
    tags: list[Literal["slow", "new", "good"]] = Field(max_length=2)


@check
def parse_returns_the_pydantic_model() -> None:
    answer = client.chat.completions.parse(
        messages=MESSAGES, response_format=Verdict, **{**greedy, "max_tokens": 200}
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    assert answer.choices[0].finish_reason == "stop"


@check
def a_forced_tool_call_is_parsed() -> None:
    tool = openai.pydantic_function_tool(Verdict, name="judge")
    forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "judge"}}}
    answer = client.chat.completions.parse(messages=MESSAGES, **forced, **{**greedy, "max_tokens": 300})
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "judge" and isinstance(call.function.parsed_arguments, Verdict)

    with client.chat.completions.stream(
        messages=MESSAGES, **forced, **{**greedy, "max_tokens": 300}
    ) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


@check
def a_model_that_knows_no_calls_answers_with_text() -> None:
    tool = openai.pydantic_function_tool(Verdict)
    for choice in ("auto", "none"):
        free = client.chat.completions.create(messages=MESSAGES, tools=[tool], tool_choice=choice, **greedy)
        assert free.choices[0].message.content and not free.choices[0].message.tool_calls


@check
def a_truncated_parse_is_the_clients_own_error() -> None:
    cut = {**greedy, "max_tokens": 3}
    call = client.chat.completions.parse
    raises(openai.LengthFinishReasonError, lambda: call(messages=MESSAGES, response_format=Verdict, **cut))


@check
def raw_responses_show_status_and_headers() -> None:
    headers = {"X-Request-Id": "seen-by-the-client"}
    raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, extra_headers=headers, **greedy)
    assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
    assert raw.headers["x-request-id"] == "seen-by-the-client"
    assert raw.parse()._request_id == "seen-by-the-client"


@check
def bad_requests_name_the_parameter() -> None:
    error = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(messages=MESSAGES, **{**greedy, "temperature": -1}),
    )
    assert error.status_code == 400 and error.param == "temperature" and error.type == "invalid_request_error"


@check
def unknown_models_and_routes_are_not_found() -> None:
    error = raises(
        openai.NotFoundError,
        lambda: client.chat.completions.create(messages=MESSAGES, **{**greedy, "model": "gpt-4"}),
    )
    assert error.code == "model_not_found"
    raises(openai.NotFoundError, lambda: client.models.retrieve("gpt-4"))
    raises(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))


@check
def too_large_a_body_is_a_status_error() -> None:
    error = raises(
        openai.APIStatusError, lambda: client.completions.create(prompt="x" * (33 << 20), **greedy)
    )
    assert error.status_code == 413


@check
def a_wrong_key_is_an_authentication_error() -> None:
    wrong = OpenAI(base_url=f"{KEYED_URL}/v1", api_key="wrong", max_retries=0)
    error = raises(openai.AuthenticationError, lambda: wrong.completions.create(prompt=PROMPT, **greedy))
    assert error.status_code == 401 and error.code == "invalid_api_key"
    right = wrong.with_options(api_key=KEY)
    assert right.completions.create(prompt=PROMPT, **greedy).usage.completion_tokens == 24


@check
def a_full_queue_is_a_rate_limit_error() -> None:
    keyed = OpenAI(base_url=f"{KEYED_URL}/v1", api_key=KEY, max_retries=0)
    with keyed.completions.create(prompt=PROMPT, stream=True, **endless) as running:
        next(iter(running))

        async def two_more() -> list[object]:
            async with AsyncOpenAI(base_url=f"{KEYED_URL}/v1", api_key=KEY, max_retries=0) as more:
                calls = [asyncio.create_task(more.completions.create(prompt=PROMPT, **endless)) for _ in "ab"]
                done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for call in waiting:
                    call.cancel()
                return [call.exception() for call in done]

        (error,) = asyncio.run(two_more())
    assert isinstance(error, openai.RateLimitError), error
    assert 1 <= int(error.response.headers["retry-after"]) <= 60
    wait_until("the keyed router is idle", lambda: metric("sglang:num_running_reqs", KEYED_URL) == 0)


@check
def a_timeout_aborts_the_request() -> None:
    before = metric(ABORTS)
    hasty = client.with_options(timeout=0.5)
    raises(openai.APITimeoutError, lambda: hasty.completions.create(prompt=PROMPT, **endless))
    wait_for_aborts(1, before)


@check
def closing_a_stream_aborts_the_request() -> None:
    before = metric(ABORTS)
    with client.completions.create(prompt=PROMPT, stream=True, **endless) as stream:
        next(iter(stream))
    wait_for_aborts(1, before)


@check
async def cancelling_a_task_aborts_the_request() -> None:
    before = metric(ABORTS)
    async with aio() as one:
        task = asyncio.create_task(one.chat.completions.create(messages=MESSAGES, **endless))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    await asyncio.to_thread(wait_for_aborts, 1, before)


scripted = OpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key="none", max_retries=0)
QUESTION = "What is (2 + 3) * 4?"


class Pair(BaseModel):
    """Two numbers."""

    a: float
    b: float


@check
def a_loop_of_calls_that_the_model_decides_on() -> None:
    """By the client's own helpers: tools from pydantic, parsed arguments, and streams that add up."""
    tools = [openai.pydantic_function_tool(Pair, name=name) for name in ("add", "multiply")]
    messages = [{"role": "user", "content": QUESTION}]
    called = []
    while True:
        asked = {"model": SCRIPTED, "messages": messages, "tools": tools}
        choice = scripted.chat.completions.parse(**asked).choices[0]
        with scripted.chat.completions.stream(**asked) as stream:
            told = stream.get_final_completion().choices[0]
        assert told.finish_reason == choice.finish_reason
        assert (told.message.content or None) == choice.message.content
        if choice.finish_reason != "tool_calls":
            break
        (call,), (streamed,) = choice.message.tool_calls, told.message.tool_calls
        assert streamed.function.arguments == call.function.arguments
        pair = call.function.parsed_arguments
        called.append((call.function.name, pair.a, pair.b))
        result = pair.a + pair.b if call.function.name == "add" else pair.a * pair.b
        answer = {"role": "tool", "tool_call_id": call.id, "content": str(result)}
        messages += [choice.message.model_dump(exclude_none=True), answer]
    assert called == [("add", 2, 3), ("multiply", 5, 4)]
    assert choice.message.content == "It is 20."


@check
def responses() -> None:
    answer = client.responses.create(model=MODEL, input=PROMPT, temperature=0, max_output_tokens=24)
    assert answer.status == "incomplete" and answer.usage.output_tokens == 24
    chat = [{"role": "user", "content": PROMPT}]
    assert (
        answer.output_text
        == client.chat.completions.create(messages=chat, **greedy).choices[0].message.content
    )
    with client.responses.stream(model=MODEL, input=PROMPT, temperature=0, max_output_tokens=24) as stream:
        *_, last = stream
    assert last.type == "response.incomplete" and last.response.output_text == answer.output_text


@check
def responses_parse() -> None:
    asked = {"model": MODEL, "input": PROMPT, "temperature": 0, "max_output_tokens": 200}
    assert isinstance(client.responses.parse(**asked, text_format=Verdict).output_parsed, Verdict)


@check
def a_loop_of_calls_over_responses() -> None:
    parameters = Pair.model_json_schema()
    tools = [
        {"type": "function", "name": name, "parameters": parameters, "strict": False}
        for name in ("add", "multiply")
    ]
    items: list[object] = [{"role": "user", "content": QUESTION}]
    called = []
    while True:
        answer = scripted.responses.create(model=SCRIPTED, input=items, tools=tools)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            pair = Pair.model_validate_json(call.arguments)
            called.append((call.name, pair.a, pair.b))
            result = pair.a + pair.b if call.name == "add" else pair.a * pair.b
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})
    assert called == [("add", 2, 3), ("multiply", 5, 4)]
    assert answer.output_text == "It is 20."


if __name__ == "__main__":
    assert "ok" in get("/health")
    main()
