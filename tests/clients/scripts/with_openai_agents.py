"""openai-agents: agents over `/v1/responses`, its default, and over `/v1/chat/completions`."""

from __future__ import annotations

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import SCRIPTED, SCRIPTED_URL, check, main
from openai import AsyncOpenAI

set_tracing_disabled(True)
CALLED: list[tuple[str, float, float]] = []
QUESTION = "What is (2 + 3) * 4?"


@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    CALLED.append(("add", a, b))
    return a + b


@function_tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    CALLED.append(("multiply", a, b))
    return a * b


def agent(kind: type) -> Agent:
    """One with the two tools."""
    client = AsyncOpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key="none", max_retries=0)
    return Agent(name="it", model=kind(SCRIPTED, client), tools=[add, multiply])


async def _runs(kind: type) -> None:
    CALLED.clear()
    result = await Runner.run(agent(kind), QUESTION)
    assert result.final_output == "It is 20."
    assert CALLED == [("add", 2, 3), ("multiply", 5, 4)]


@check
async def responses() -> None:
    await _runs(OpenAIResponsesModel)


@check
async def chat_completions() -> None:
    await _runs(OpenAIChatCompletionsModel)


@check
async def streamed_responses() -> None:
    CALLED.clear()
    result = Runner.run_streamed(agent(OpenAIResponsesModel), QUESTION)
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds and "run_item_stream_event" in kinds
    assert result.final_output == "It is 20." and len(CALLED) == 2


if __name__ == "__main__":
    main()
