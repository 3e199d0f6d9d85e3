"""`/v1/...`: OpenAI's API, for its clients."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from router.api.chat_bodies import ChatBody
from router.api.openai_answers import ChatCompletion, ChatCompletionChunk, Completion, ModelCard, ModelList
from router.api.openai_bodies import CompletionBody
from router.api.openai_requests import OpenAIRequest, read_chat, read_completion, unknown_model
from router.api.openai_shapes import ChatShape, CompletionShape, MaybeUsage, Reply, Shape, best
from router.api.request_log import note_group
from router.dispatch.live_rids import Claim
from router.http.answer import Answer
from router.http.body import JsonRoute
from router.http.limits import HttpLimits
from router.http.responses import event_stream, json_response, stream_response, while_connected
from router.request.generation import Generation, GenerationGroup, Generator
from router.request.queue_limit import PlacesOfRequest, QueuePlaces
from router.text.served_model import ModelSlot, ServedModel
from router.text.text_workers import TextWorkers
from shared.errors import RequestError

_CHARS_A_LOGPROB = 2


def openai_routes(
    generator: Generator,
    model: ModelSlot,
    limits: HttpLimits,
    context_length: Callable[[], int],
) -> APIRouter:
    """The routes. Those that generate are behind a QueueGate. `context_length` returns the fleet's."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    async def respond(
        request: Request, asked: OpenAIRequest, shape: Shape, places: QueuePlaces, claim: Claim
    ) -> Response:
        group = generator.open(asked.prompts, model.get().tokenizer, claim, places)
        workers = model.get().tokenizer.workers
        note_group(request, group)
        if asked.stream is not None:
            return await stream_response(request, _events(group, asked, shape, workers))
        return json_response(await while_connected(request.receive, _answer(group, asked, shape, workers)))

    @router.post("/completions", response_model=Completion, responses=event_stream(Completion))
    async def completions(request: Request, body: CompletionBody, places: PlacesOfRequest) -> Response:
        """Complete one prompt or several."""
        with generator.claim() as claim:
            reading = read_completion(body, model.get(), limits, request.headers, places, claim)
            asked = await while_connected(request.receive, reading)
            shape = CompletionShape(_reply(asked, model.get()), model.get().tokenizer, asked.echoes)
            return await respond(request, asked, shape, places, claim)

    @router.post(
        "/chat/completions", response_model=ChatCompletion, responses=event_stream(ChatCompletionChunk)
    )
    async def chat_completions(request: Request, body: ChatBody, places: PlacesOfRequest) -> Response:
        """Answer a conversation."""
        with generator.claim() as claim:
            reading = read_chat(body, model.get(), limits, request.headers, places, claim)
            asked = await while_connected(request.receive, reading)
            shape = ChatShape(
                _reply(asked, model.get()),
                model.get().tokenizer,
                asked.reads,
                hides_reasoning=asked.hides_reasoning,
            )
            return await respond(request, asked, shape, places, claim)

    @router.post("/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        """A 404 with a sentence."""
        raise RequestError("this server generates text: it has no embeddings", status=404)

    @router.get("/models")
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[_model_card(model.get(), context_length())])

    @router.get("/models/{model_id:path}")
    async def model_by_id(model_id: str) -> ModelCard:
        """The model, by its name."""
        if model_id != model.get().name:
            raise unknown_model(model_id, model.get())
        return _model_card(model.get(), context_length())

    return router


def _reply(asked: OpenAIRequest, model: ServedModel) -> Reply:
    return Reply(
        id=asked.id,
        created=int(time.time()),
        model=model.name,
        with_logprobs=asked.with_logprobs,
        with_timeline=asked.with_timeline,
    )


async def _answer(group: GenerationGroup, asked: OpenAIRequest, shape: Shape, workers: TextWorkers) -> Answer:
    async with group:
        generations = await group.finished()
        chosen = generations if asked.best_n is None else best(generations, asked.best_n)
        num_chars = sum(map(_cost_in_chars, chosen))
        return await workers.run(num_chars, lambda: shape.whole(chosen, generations))


async def _events(
    group: GenerationGroup, asked: OpenAIRequest, shape: Shape, workers: TextWorkers
) -> AsyncGenerator[object, None]:
    options = asked.stream
    assert options is not None

    def usage_so_far() -> MaybeUsage:
        return shape.usage(group.generations) if options.continuous_usage_stats else UNSET

    num_sent: dict[int, int] = {}
    async with group:
        async for generation, text in group.steps():
            first = num_sent.get(generation.index)
            if first is None:
                first = num_sent[generation.index] = 0
                make = functools.partial(shape.opening, generation, usage_so_far())
                opening = await workers.run(_cost_in_chars(generation), make)
                if opening is not None:
                    yield opening
            if text or generation.finish_reason is not None:
                more = shape.delta(generation, text, first, usage_so_far())
                if more is not None:
                    yield more
                    num_sent[generation.index] = len(generation.output_ids)
        if options.include_usage:
            yield shape.closing(shape.usage(group.generations))


def _cost_in_chars(generation: Generation) -> int:
    """The cost of writing the logprobs of an echoed prompt, as a number of characters that cost as much to encode."""
    wanted = generation.prompt.work.params.logprobs
    if wanted is None:
        return 0
    return _CHARS_A_LOGPROB * wanted.num_input_logprobs(len(generation.prompt.work.input_ids))


def _model_card(model: ServedModel, context_length: int) -> ModelCard:
    return ModelCard(id=model.name, root=model.model, max_model_len=context_length)
