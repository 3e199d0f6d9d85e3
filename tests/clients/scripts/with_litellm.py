"""litellm as a library: its OpenAI-compatible provider with `api_base`."""

from __future__ import annotations

import json

import litellm
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
    main,
    post,
    raises,
)
from pydantic import BaseModel, Field

litellm.telemetry = False
served = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
greedy = {"temperature": 0, "max_tokens": 24}
CHAT = f"openai/{MODEL}"
TOO_LONG = [{"role": "user", "content": "word " * 100_000}]
TEXT = f"text-completion-openai/{MODEL}"


def expected(path: str, **prompt: object) -> dict[str, object]:
    """The choice that the server gives to plain HTTP."""
    choice: dict[str, object] = post(path, {"model": MODEL, **prompt, **greedy})["choices"][0]
    return choice


@check
def completion() -> None:
    answer = litellm.completion(model=CHAT, messages=MESSAGES, **served, **greedy)
    choice = expected("/v1/chat/completions", messages=MESSAGES)
    assert answer.choices[0].message.content == choice["message"]["content"] != ""
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24


@check
def completion_stream() -> None:
    stream = litellm.completion(
        model=CHAT,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **served,
        **greedy,
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected("/v1/chat/completions", messages=MESSAGES)["message"]["content"]
    assert litellm.stream_chunk_builder(chunks, messages=MESSAGES).usage.completion_tokens == 24


@check
def text_completion() -> None:
    whole = litellm.text_completion(model=TEXT, prompt=PROMPT, **served, **greedy)
    assert whole.choices[0].text == expected("/v1/completions", prompt=PROMPT)["text"] != ""
    pieces = litellm.text_completion(model=TEXT, prompt=PROMPT, stream=True, **served, **greedy)
    assert "".join(piece.choices[0].text or "" for piece in pieces) == whole.choices[0].text


@check
def own_parameters_pass_through() -> None:
    extra = {"extra_body": {"regex": "[0-9]{4}-[0-9]{2}", "ignore_eos": False}}
    answer = litellm.completion(model=CHAT, messages=MESSAGES, **extra, **served, **greedy)
    year, dash, month = answer.choices[0].message.content.partition("-")
    assert dash and len(year) == 4 and len(month) == 2 and (year + month).isdigit()


class Verdict(BaseModel):
    """What a reviewer says."""

    lines: int = Field(ge=1, le=99)
    tested: bool


@check
def structured_output() -> None:
    answer = litellm.completion(
        model=CHAT, messages=MESSAGES, response_format=Verdict, **served, **{**greedy, "max_tokens": 100}
    )
    Verdict.model_validate(json.loads(answer.choices[0].message.content))


@check
def a_forced_tool_call() -> None:
    function = {"name": "judge", "parameters": Verdict.model_json_schema()}
    forced = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    answer = litellm.completion(
        model=CHAT, messages=MESSAGES, **forced, **served, **{**greedy, "max_tokens": 200}
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "judge"
    Verdict.model_validate_json(call.function.arguments)


@check
def errors_have_litellms_types() -> None:
    def call(**changed: object) -> object:
        return litellm.completion(**{"model": CHAT, "messages": MESSAGES, **served, **greedy, **changed})

    assert raises(litellm.BadRequestError, lambda: call(temperature=-1)).status_code == 400
    assert raises(litellm.NotFoundError, lambda: call(model="openai/gpt-4")).status_code == 404
    assert raises(litellm.ContextWindowExceededError, lambda: call(messages=TOO_LONG)).status_code == 400
    keyed = {"api_base": f"{KEYED_URL}/v1"}
    assert raises(litellm.AuthenticationError, lambda: call(**keyed)).status_code == 401
    assert call(**keyed, api_key=KEY).usage.completion_tokens == 24


NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
QUESTION = [{"role": "user", "content": "What is (2 + 3) * 4?"}]


@check
def a_call_that_the_model_decides_on() -> None:
    asked = {"messages": QUESTION, "tools": [ADD], "api_key": "none", "num_retries": 0}
    for model, base in (
        (f"openai/{SCRIPTED}", f"{SCRIPTED_URL}/v1"),
        (f"anthropic/{SCRIPTED}", SCRIPTED_URL),
    ):
        message = litellm.completion(model=model, api_base=base, **asked).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        assert message.reasoning_content == "I add first."


@check
async def its_own_bridge_from_anthropics_api() -> None:
    answer = await litellm.anthropic.messages.acreate(
        model=f"openai/{SCRIPTED}",
        api_base=f"{SCRIPTED_URL}/v1",
        api_key="none",
        max_tokens=200,
        messages=QUESTION,
        tools=[{"name": "add", "input_schema": NUMBERS}],
    )
    used = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert [(block["name"], block["input"]) for block in used] == [("add", {"a": 2, "b": 3})]


if __name__ == "__main__":
    main()
