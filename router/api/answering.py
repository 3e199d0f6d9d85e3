"""How a route that generates answers: a body is read, its sequences are sent, and a dialect writes what they become.

body ──read──▶ Asked ──▶ GenerationGroup ──Dialect──▶ events, or one answer
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from starlette.types import Scope

from router.http.config import HttpLimits
from router.http.responses import StreamForm, json_response, stream_response, while_connected
from router.request.admission import Admission
from router.request.generation import GenerationGroup, Generator
from router.request.prompt import Intake, Prompt
from router.text.served_model import ModelSlot, ServedModel


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A checked body: what is to be completed, and whether the answer is a stream of events."""

    prompts: Sequence[Prompt]
    streams: bool


class Dialect(Protocol):
    """The words of one route, for the answer to one request."""

    @property
    def form(self) -> StreamForm:
        """Of a stream."""
        ...

    def events(self, group: GenerationGroup) -> AsyncGenerator[object, None]:
        """The events of a stream. The group is entered here."""
        ...

    async def answer(self, group: GenerationGroup) -> object:
        """The answer to a request for no stream. The group is entered here."""
        ...


A = TypeVar("A", bound=Asked)
_GROUP = "generation_group"


@dataclass(frozen=True)
class Desk:
    """What the routes that generate have in common."""

    generator: Generator
    slot: ModelSlot
    limits: HttpLimits

    async def respond(
        self,
        request: Request,
        admission: Admission,
        read: Callable[[Intake], Coroutine[Any, Any, A]],
        dialect: Callable[[A, ServedModel], Dialect],
    ) -> Response:
        """Read a body, generate, and answer in a dialect. Raises RequestError."""
        model = self.slot.get()
        intake = Intake(model, self.limits, request.headers, admission)
        asked = await while_connected(request.receive, read(intake))
        group = self.generator.open(asked.prompts, model.tokenizer, admission)
        setattr(request.state, _GROUP, group)
        words = dialect(asked, model)
        if asked.streams:
            return await stream_response(request, words.events(group), words.form)
        return json_response(await while_connected(request.receive, words.answer(group)))


def group_of(scope: Scope) -> GenerationGroup | None:
    """The sequences of a request that has been answered, if it is one that has any."""
    group: GenerationGroup | None = scope["state"].get(_GROUP)
    return group
