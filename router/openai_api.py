"""`/v1/...`: OpenAI's API, for its clients."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import APIRouter, Request, Response

from router.admission import Admission, Ticket
from router.body import parse
from router.generate_api import timeline_fields
from router.generation import Generation, GenerationGroup, Generator
from router.limits import HttpLimits
from router.logprobs import JudgedText, chat_logprobs
from router.openai_bodies import ChatBody, CompletionBody, StreamOptions
from router.openai_requests import OpenAIRequest, read_chat, read_completion, unknown_model
from router.request_log import note_group
from router.responses import json_response, read_body, stream_response, while_connected
from router.served_model import ModelSlot, ServedModel
from router.tokenizer import Tokenizer

Choice = dict[str, object]


class Shape(Protocol):
    """How one of the two routes words its answers."""

    answer_object: str
    event_object: str

    def opening(self, generation: Generation) -> Choice | None:
        """What a choice's first event holds beside its index, if there is one before any text."""
        ...

    def delta(self, generation: Generation, text: str, num_told: int) -> Choice:
        """More text in an event, and the logprobs of the output tokens after the first `num_told`."""
        ...

    def whole(self, generation: Generation) -> Choice:
        """All of the text in one answer, and all logprobs."""
        ...


class CompletionShape:
    """/v1/completions."""

    answer_object = "text_completion"
    event_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoes: Sequence[str] | None) -> None:
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._judged: dict[int, JudgedText] = {}

    def opening(self, generation: Generation) -> Choice | None:
        """See Shape."""
        if self._echoes is None:
            return None
        return {"text": self._echo(generation), "logprobs": self._logprobs(generation, prompt=True)}

    def delta(self, generation: Generation, text: str, num_told: int) -> Choice:
        """See Shape."""
        return {"text": text, "logprobs": self._logprobs(generation, output_from=num_told)}

    def whole(self, generation: Generation) -> Choice:
        """See Shape."""
        text = self._echo(generation) + generation.text
        return {"text": text, "logprobs": self._logprobs(generation, prompt=True, output_from=0)}

    def _echo(self, generation: Generation) -> str:
        return self._echoes[generation.prompt_index] if self._echoes is not None else ""

    def _logprobs(
        self, generation: Generation, *, prompt: bool = False, output_from: int | None = None
    ) -> dict[str, object] | None:
        if generation.prompt.sampling.params.logprobs is None:
            return None
        judged = self._judged.get(generation.index)
        if judged is None:
            echo = self._echo(generation) if self._echoes is not None else None
            judged = self._judged[generation.index] = JudgedText(generation, self._tokenizer, echo)
        return judged.worded(prompt=prompt, output_from=output_from)


class ChatShape:
    """/v1/chat/completions."""

    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, generation: Generation) -> Choice | None:
        """See Shape."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, generation: Generation, text: str, num_told: int) -> Choice:
        """See Shape."""
        delta = {"content": text} if text else {}
        return {"delta": delta, "logprobs": self._logprobs(generation, num_told)}

    def whole(self, generation: Generation) -> Choice:
        """See Shape."""
        message = {"role": "assistant", "content": generation.text}
        return {"message": message, "logprobs": self._logprobs(generation, 0)}

    def _logprobs(self, generation: Generation, first: int) -> dict[str, object] | None:
        if generation.prompt.sampling.params.logprobs is None:
            return None
        return chat_logprobs(generation, first, self._tokenizer)


@dataclass(frozen=True)
class Reply:
    """What all events and the answer of one request have in common."""

    shape: Shape
    id: str
    created: int
    model: str
    with_timeline: bool

    @classmethod
    def begin(cls, shape: Shape, asked: OpenAIRequest, model: ServedModel) -> Reply:
        """The reply to a request that is about to be dispatched."""
        return cls(shape, asked.id, int(time.time()), model.name, asked.with_timeline)

    def answer(self, generations: Sequence[Generation]) -> dict[str, object]:
        """The one answer of a request that is not streamed."""
        choices = [self._choice(g, self.shape.whole(g), _finish(g)) for g in generations]
        return {**self._head(self.shape.answer_object), "choices": choices, "usage": usage(generations)}

    def event(self, generation: Generation, content: Choice, *, last: bool) -> dict[str, object]:
        """One event with something new of one choice."""
        choice = self._choice(generation, content, _finish(generation) if last else _UNFINISHED)
        return {**self._head(self.shape.event_object), "choices": [choice]}

    def usage_event(self, generations: Sequence[Generation]) -> dict[str, object]:
        """The last event, for those who asked for it."""
        return {**self._head(self.shape.event_object), "choices": [], "usage": usage(generations)}

    def _choice(self, generation: Generation, content: Choice, end: Choice) -> Choice:
        timeline = timeline_fields(generation) if self.with_timeline else {}
        return {"index": generation.index, "logprobs": None, **content, **end, **timeline}

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


_UNFINISHED: Choice = {"finish_reason": None, "matched_stop": None}


def openai_routes(
    generator: Generator,
    model: ModelSlot,
    limits: HttpLimits,
    context_length: Callable[[], int],
    admission: Admission,
) -> APIRouter:
    """The routes. `context_length` is what the fleet can serve now."""
    router = APIRouter(prefix="/v1")

    async def respond(request: Request, asked: OpenAIRequest, shape: Shape, ticket: Ticket) -> Response:
        reply = Reply.begin(shape, asked, model.get())
        group = generator.open(asked.prompts, model.get().tokenizer, ticket)
        note_group(request, group)
        if asked.stream is not None:
            return await stream_response(request, _events(group, reply, asked.stream))
        return json_response(await while_connected(request.receive, _answer(group, reply)))

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """Complete one prompt or several."""
        with admission.ticket() as ticket:
            body = parse(CompletionBody, await read_body(request, limits.max_body_bytes))
            asked = await read_completion(body, model.get(), limits, request.headers, ticket)
            shape = CompletionShape(model.get().tokenizer, asked.echoes)
            return await respond(request, asked, shape, ticket)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        with admission.ticket() as ticket:
            body = parse(ChatBody, await read_body(request, limits.max_body_bytes))
            asked = await read_chat(body, model.get(), limits, request.headers, ticket)
            return await respond(request, asked, ChatShape(model.get().tokenizer), ticket)

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
    async with group:
        return reply.answer(await group.finished())


async def _events(
    group: GenerationGroup, reply: Reply, options: StreamOptions
) -> AsyncGenerator[object, None]:
    def with_usage(event: dict[str, object]) -> dict[str, object]:
        return {**event, "usage": usage(group.generations)} if options.continuous_usage_stats else event

    opened: set[int] = set()
    num_told: dict[int, int] = {}
    async with group:
        async for generation, text in group.steps():
            if generation.index not in opened:
                opened.add(generation.index)
                opening = reply.shape.opening(generation)
                if opening is not None:
                    yield with_usage(reply.event(generation, opening, last=False))
            last = generation.finish_reason is not None
            if text or last:
                delta = reply.shape.delta(generation, text, num_told.get(generation.index, 0))
                num_told[generation.index] = len(generation.output_ids)
                yield with_usage(reply.event(generation, delta, last=last))
        if options.include_usage:
            yield reply.usage_event(group.generations)


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
