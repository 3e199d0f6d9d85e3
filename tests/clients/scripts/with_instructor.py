"""instructor: pydantic models out of a router, in its JSON modes and by forced tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal

import instructor
from checks import MESSAGES, MODEL, SCRIPTED, SCRIPTED_URL, URL, check, main, post, raises
from instructor.core import IncompleteOutputException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

options = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "max_retries": 1}


class Step(BaseModel):
    """One of several."""

    kind: Literal["read", "write"]
    count: int = Field(ge=0, le=9)


class Plan(BaseModel):
    """Nested, with a list, and all of it bounded."""

    language: Literal["python", "c", "rust"]
    steps: list[Step] = Field(min_length=1, max_length=3)
    tested: bool


@check
def json_schema_mode() -> None:
    client = instructor.from_openai(OpenAI(**options), mode=instructor.Mode.JSON_SCHEMA)
    plan = client.chat.completions.create(response_model=Plan, **asked)
    assert isinstance(plan, Plan) and 1 <= len(plan.steps) <= 3


@check
async def json_schema_mode_async() -> None:
    client = instructor.from_openai(AsyncOpenAI(**options), mode=instructor.Mode.JSON_SCHEMA)
    plans = await asyncio.gather(
        *(client.chat.completions.create(response_model=Plan, **asked) for _ in range(3))
    )
    texts = {plan.model_dump_json() for plan in plans}
    assert len(texts) == 1, "greedy answers are the same"


@check
def partial_answers_stream() -> None:
    client = instructor.from_openai(OpenAI(**options), mode=instructor.Mode.JSON_SCHEMA)
    *partial, last = client.chat.completions.create_partial(response_model=Plan, **asked)
    assert partial, "more than the whole came"
    Plan.model_validate(last.model_dump())


@check
def tools_mode() -> None:
    """The default of instructor: it forces a call of the function that the model stands for."""
    client = instructor.from_openai(OpenAI(**options))
    assert client.mode is instructor.Mode.TOOLS
    assert isinstance(client.chat.completions.create(response_model=Plan, **asked), Plan)


@check
def json_mode() -> None:
    """It promises an object, not its fields; a bias keeps so small a model from writing one without an end."""

    class Lenient(BaseModel):
        """Valid without fields."""

        note: str = "nothing was said"

    (brace,) = post("/tokenize", {"prompt": "}", "add_special_tokens": False})["tokens"]
    client = instructor.from_openai(OpenAI(**options), mode=instructor.Mode.JSON)
    answer = client.chat.completions.create(response_model=Lenient, logit_bias={str(brace): 100}, **asked)
    assert answer.note == "nothing was said"


@check
def an_answer_that_was_cut_is_instructors_own_error() -> None:
    client = instructor.from_openai(OpenAI(**options), mode=instructor.Mode.JSON)
    cut = {**asked, "max_tokens": 4}
    error = raises(
        IncompleteOutputException, lambda: client.chat.completions.create(response_model=Plan, **cut)
    )
    assert error.last_completion.choices[0].message.content.lstrip().startswith("{")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@check
def parallel_tools_mode() -> None:
    scripted = OpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(scripted, mode=instructor.Mode.PARALLEL_TOOLS)
    found = client.chat.completions.create(
        model=SCRIPTED,
        messages=[{"role": "user", "content": "Ann and Bob are 7 and 8."}],
        response_model=Iterable[Person],
    )
    assert [(one.name, one.age) for one in found] == [("Ann", 7), ("Bob", 8)]


@check
def responses_tools_mode() -> None:
    scripted = OpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(scripted, mode=instructor.Mode.RESPONSES_TOOLS)
    messages = [{"role": "user", "content": "Ann is 7."}]
    found = client.chat.completions.create(model=SCRIPTED, messages=messages, response_model=Person)
    assert (found.name, found.age) == ("Ann", 7)


if __name__ == "__main__":
    main()
