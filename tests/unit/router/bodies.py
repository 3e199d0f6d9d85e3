"""Bodies as handlers get them, validated as FastAPI does and worded as the router does, and their prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from router.api.generate_api import GenerateBody, read_generate
from router.api.openai_bodies import ChatBody, CompletionBody
from router.api.openai_requests import read_chat, read_completion
from router.config import HttpLimits
from router.dispatch.fleet_view import WaitingQueue
from router.http.body import Body, wrong_input
from router.request.admission import Admissions
from router.request.prompt import Intake, Prompt
from router.text.served_model import ServedModel

B = TypeVar("B", bound=Body)
READ: dict[type[Body], Any] = {
    GenerateBody: read_generate,
    CompletionBody: read_completion,
    ChatBody: read_chat,
}


def validate(kind: type[B], values: object) -> B:
    """Decoded JSON as a `kind`. Raises RequestError."""
    try:
        return kind.model_validate(values, from_attributes=True)
    except ValidationError as e:
        raise wrong_input([{**error, "loc": ("body", *error["loc"])} for error in e.errors()]) from e


async def prompts_of(
    model: ServedModel, kind: type[Body], values: object, headers: Mapping[str, str] | None = None
) -> list[Prompt]:
    """What becomes of a body, as a route reads it. Raises RequestError."""
    admission = Admissions(WaitingQueue(time.monotonic), 100, lambda: None).beside_the_queue()
    intake = Intake(model, HttpLimits(), headers or {}, admission)
    return list((await READ[kind](validate(kind, values), intake)).prompts)
