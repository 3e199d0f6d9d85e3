"""`/v1/...`: OpenAI's API, for its clients."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import APIRouter, Request, Response

from router.fields import parse_object
from router.generate_api import HttpLimits
from router.generation import Generation, GenerationGroup, Generator
from router.openai_requests import OpenAIRequest, StreamOptions, read_chat, read_completion, unknown_model
from router.responses import json_response, read_body, stream_response, while_connected
from router.served_model import ModelSlot, ServedModel

Choice = dict[str, object]


class Shape(Protocol):
    """How one of the two routes words its answers."""

    answer_object: str
    event_object: str

    def opening(self) -> Choice | None:
        """What a choice's first event holds beside its index, if there is one before any text."""
        ...

    def delta(self, text: str) -> Choice:
        """More text in an event."""
        ...

    def whole(self, text: str) -> Choice:
        """All of the text in one answer."""
        ...


class CompletionShape:
    """/v1/completions."""

    answer_object = "text_completion"
    event_object = "text_completion"

    def opening(self) -> Choice | None:
        """See Shape."""
        return None

    def delta(self, text: str) -> Choice:
        """See Shape."""
        return {"text": text}

    def whole(self, text: str) -> Choice:
        """See Shape."""
        return {"text": text}


class ChatShape:
    """/v1/chat/completions."""

    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def opening(self) -> Choice | None:
        """See Shape."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> Choice:
        """See Shape."""
        return {"delta": {"content": text} if text else {}}

    def whole(self, text: str) -> Choice:
        """See Shape."""
        return {"message": {"role": "assistant", "content": text}}


@dataclass(frozen=True)
class Reply:
    """What all events and the answer of one request have in common."""

    shape: Shape
    id: str
    created: int
    model: str

    @classmethod
    def begin(cls, shape: Shape, asked: OpenAIRequest, model: ServedModel) -> Reply:
        """The reply to a request that is about to be dispatched."""
        return cls(shape, asked.id, int(time.time()), model.name)

    def answer(self, generations: Sequence[Generation]) -> dict[str, object]:
        """The one answer of a request that is not streamed."""
        choices = [_choice(g, self.shape.whole(g.text), _finish(g)) for g in generations]
        return {**self._head(self.shape.answer_object), "choices": choices, "usage": usage(generations)}

    def event(self, generation: Generation, content: Choice, *, last: bool) -> dict[str, object]:
        """One event with something new of one choice."""
        choice = _choice(generation, content, _finish(generation) if last else _UNFINISHED)
        return {**self._head(self.shape.event_object), "choices": [choice]}

    def usage_event(self, generations: Sequence[Generation]) -> dict[str, object]:
        """The last event, for those who asked for it."""
        return {**self._head(self.shape.event_object), "choices": [], "usage": usage(generations)}

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


_UNFINISHED: Choice = {"finish_reason": None, "matched_stop": None}


def openai_routes(
    generator: Generator, model: ModelSlot, limits: HttpLimits, context_length: Callable[[], int]
) -> APIRouter:
    """The routes. `context_length` is what the fleet can serve now."""
    router = APIRouter(prefix="/v1")

    async def respond(request: Request, asked: OpenAIRequest, shape: Shape) -> Response:
        reply = Reply.begin(shape, asked, model.get())
        group = generator.open(asked.prompts, model.get().tokenizer)
        if asked.stream is not None:
            return await stream_response(request, _events(group, reply, asked.stream))
        return json_response(await while_connected(request.receive, _answer(group, reply)))

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """Complete one prompt or several."""
        fields = parse_object(await read_body(request, limits.max_body_bytes))
        return await respond(request, await read_completion(fields, model.get(), limits), CompletionShape())

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        fields = parse_object(await read_body(request, limits.max_body_bytes))
        return await respond(request, await read_chat(fields, model.get(), limits), ChatShape())

    @router.get("/models", response_model=None)
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [_model_card(model.get(), context_length())]})

    @router.get("/models/{model_id:path}", response_model=None)
    async def model_by_id(model_id: str) -> Response:
        """The model, by its name."""
        if model_id != model.get().name:
            raise unknown_model(model_id, model.get())
        return json_response(_model_card(model.get(), context_length()))

    return router


def usage(generations: Sequence[Generation]) -> dict[str, object]:
    """Tokens so far. A prompt counts once, however many choices it has."""
    first_choices = [g for g in generations if g.choice == 0]
    prompt_tokens = sum(g.req.prompt_len for g in first_choices)
    completion_tokens = sum(len(g.output_ids) for g in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(g.req.cached_tokens for g in first_choices)},
    }


async def _answer(group: GenerationGroup, reply: Reply) -> dict[str, object]:
    with group:
        return reply.answer(await group.finished())


async def _events(
    group: GenerationGroup, reply: Reply, options: StreamOptions
) -> AsyncGenerator[object, None]:
    def with_usage(event: dict[str, object]) -> dict[str, object]:
        return {**event, "usage": usage(group.generations)} if options.continuous_usage else event

    opened: set[int] = set()
    with group:
        async for generation, text in group.steps():
            opening = reply.shape.opening()
            if opening is not None and generation.index not in opened:
                opened.add(generation.index)
                yield with_usage(reply.event(generation, opening, last=False))
            last = generation.finish_reason is not None
            if text or last:
                yield with_usage(reply.event(generation, reply.shape.delta(text), last=last))
        if options.usage:
            yield reply.usage_event(group.generations)


def _choice(generation: Generation, content: Choice, end: Choice) -> Choice:
    return {"index": generation.index, **content, "logprobs": None, **end}


def _finish(generation: Generation) -> Choice:
    reason = generation.finish_reason
    assert reason is not None
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def _model_card(model: ServedModel, context_length: int) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "baton",
        "root": model.model,
        "max_model_len": context_length,
    }
