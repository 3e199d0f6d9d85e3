"""langchain-openai: `ChatOpenAI` and `OpenAI` pointed at a router with `base_url`."""

from __future__ import annotations

import asyncio
import functools
import operator
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
    main,
    post,
    raises,
)
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

served = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}
chat = ChatOpenAI(**served, temperature=0, max_tokens=24)
SYSTEM, USER = (m["content"] for m in MESSAGES)
TALK = [("system", SYSTEM), ("user", USER)]


def expected() -> str:
    """What the server says to plain HTTP."""
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    text: str = post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


@check
def invoke() -> None:
    message = chat.invoke(TALK)
    assert message.content == expected() != ""
    assert message.usage_metadata["output_tokens"] == 24
    assert message.response_metadata["finish_reason"] == "length"
    assert message.response_metadata["model_name"] == MODEL


@check
def stream_with_usage() -> None:
    chunks = list(ChatOpenAI(**served, temperature=0, max_tokens=24, stream_usage=True).stream(TALK))
    assert len(chunks) > 4
    total = functools.reduce(operator.add, chunks)
    assert total.text == expected()
    assert total.usage_metadata["output_tokens"] == 24


@check
async def async_calls() -> None:
    answers = await asyncio.gather(*(chat.ainvoke(TALK) for _ in range(4)))
    assert {answer.content for answer in answers} == {expected()}
    assert "".join([chunk.text async for chunk in chat.astream(TALK)]) == expected()


class Verdict(BaseModel):
    """What a reviewer says."""

    language: Literal["python", "c", "rust"]
    lines: int = Field(ge=1, le=99)
    tested: bool


@check
def structured_output_by_json_schema() -> None:
    model = ChatOpenAI(**served, temperature=0, max_tokens=200).with_structured_output(
        Verdict, method="json_schema"
    )
    assert isinstance(model.invoke(TALK), Verdict)
    assert all(isinstance(verdict, Verdict) for verdict in model.batch([TALK, TALK]))


@check
def structured_output_by_a_forced_tool_call() -> None:
    model = ChatOpenAI(**served, temperature=0, max_tokens=200).with_structured_output(
        Verdict, method="function_calling"
    )
    assert isinstance(model.invoke(TALK), Verdict)
    partial = list(model.stream(TALK))
    assert partial and isinstance(partial[-1], Verdict)


@check
def logprobs() -> None:
    message = chat.bind(logprobs=True, top_logprobs=2).invoke(TALK)
    content = message.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == message.content
    assert all(len(token["top_logprobs"]) == 2 for token in content)


@check
def text_completion() -> None:
    model = OpenAI(**served, temperature=0, max_tokens=24)
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    whole = post("/v1/completions", body)["choices"][0]["text"]
    assert model.invoke(PROMPT) == whole == "".join(model.stream(PROMPT))


@check
def errors_keep_their_types() -> None:
    raises(openai.BadRequestError, lambda: chat.bind(temperature=-1).invoke(TALK))
    wrong = ChatOpenAI(**{**served, "base_url": f"{KEYED_URL}/v1"})
    raises(openai.AuthenticationError, lambda: wrong.invoke(TALK))
    right = ChatOpenAI(**{**served, "base_url": f"{KEYED_URL}/v1", "api_key": KEY}, max_tokens=4)
    assert right.invoke(TALK).usage_metadata["output_tokens"] == 4


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


@check
def an_agent_with_two_tools_and_three_turns() -> None:
    for use_responses_api in (False, True):
        model = ChatOpenAI(
            base_url=f"{SCRIPTED_URL}/v1",
            api_key="none",
            model=SCRIPTED,
            max_retries=0,
            use_responses_api=use_responses_api,
        )
        asked = {"messages": [("user", "What is (2 + 3) * 4?")]}
        messages = create_agent(model, tools=[add, multiply])
        messages = messages.invoke(asked)["messages"]
        assert [message.type for message in messages] == ["human", *("ai", "tool") * 2, "ai"]
        assert [message.content for message in messages if message.type == "tool"] == ["5.0", "20.0"]
        assert messages[-1].text == "It is 20."


if __name__ == "__main__":
    main()
