"""`POST /generate`, the native API, with SGLang's fields and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from router.api.generate_bodies import GenerateBody
from router.api.generate_requests import GenerateRequest, read_generate
from router.api.logprobs import NativeLogprobs
from router.api.native_answers import FirstTokenAnswer, GenerateAnswer, MetaInfo, StampAnswer
from router.api.request_log import note_group
from router.http.body import JsonRoute
from router.http.limits import HttpLimits
from router.http.responses import event_stream, json_response, stream_response, while_connected
from router.request.generation import Generation, GenerationGroup, Generator
from router.request.queue_limit import PlacesOfRequest
from router.text.served_model import ModelSlot
from router.text.tokenizer import Tokenizer

WEIGHT_VERSION = "default"

_ANSWER = GenerateAnswer | list[GenerateAnswer]


def generate_routes(generator: Generator, model: ModelSlot, limits: HttpLimits) -> APIRouter:
    """The route, behind a QueueGate."""
    router = APIRouter(tags=["SGLang"], route_class=JsonRoute)

    @router.put("/generate", response_model=_ANSWER, responses=event_stream(GenerateAnswer))
    @router.post("/generate", response_model=_ANSWER, responses=event_stream(GenerateAnswer))
    async def generate(request: Request, body: GenerateBody, places: PlacesOfRequest) -> Response:
        """Complete one prompt or several."""
        with generator.claim() as claim:
            reading = read_generate(body, model.get(), limits, request.headers, places, claim)
            asked = await while_connected(request.receive, reading)
            group = generator.open(asked.prompts, model.get().tokenizer, claim, places)
            note_group(request, group)
            if asked.stream:
                return await stream_response(request, _events(group, asked, model.get().tokenizer))
            answer = _answer(group, asked, model.get().tokenizer)
            return json_response(await while_connected(request.receive, answer))

    return router


def meta_info(generation: Generation, *, with_timeline: bool, logprobs: Mapping[str, Any]) -> MetaInfo:
    """The `meta_info` of a sequence. `logprobs` are fields of NativeLogprobs."""
    req = generation.req
    timeline = timeline_fields(generation) if with_timeline else {}
    return MetaInfo(
        id=generation.prompt.rid,
        finish_reason=generation.finish_reason,
        prompt_tokens=req.prompt_len,
        completion_tokens=len(generation.output_ids),
        cached_tokens=req.cached_tokens,
        weight_version=WEIGHT_VERSION,
        e2e_latency=UNSET if req.ended_at is None else req.ended_at - req.started_at,
        **timeline,
        **logprobs,
    )


def timeline_fields(generation: Generation) -> dict[str, Any]:
    """The stages known so far, in order of time. A node sends its stages with its first token and with its last."""
    start = generation.req.start
    return {
        "timeline": [StampAnswer.of(stamp) for stamp in generation.timeline],
        "first_token": FirstTokenAnswer.of(start) if start is not None else UNSET,
        "kv_pages_transferred": generation.req.kv_pages_transferred,
        "kv_bytes_transferred": generation.req.kv_bytes_transferred,
    }


async def _answer(group: GenerationGroup, asked: GenerateRequest, tokenizer: Tokenizer) -> object:
    async with group:
        generations = await group.finished()
        answers = [await _Output(generation, asked, tokenizer).so_far() for generation in generations]
    return answers if asked.as_list else answers[0]


async def _events(
    group: GenerationGroup, asked: GenerateRequest, tokenizer: Tokenizer
) -> AsyncGenerator[object, None]:
    async with group:
        outputs = [_Output(generation, asked, tokenizer) for generation in group.generations]
        async for generation, _ in group.steps():
            yield await outputs[generation.index].so_far(with_index=asked.as_list)


class _Output:
    """Makes the answers of one sequence."""

    def __init__(self, generation: Generation, asked: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._with_timeline = asked.with_timeline
        text_of = tokenizer.token_text if asked.with_logprob_text else None
        self._logprobs = NativeLogprobs(generation, text_of)

    async def so_far(self, *, with_index: bool = False) -> GenerateAnswer:
        """The answer for the output so far. Its lists grow, so it is encoded before the next call."""
        logprobs = await self._logprobs.so_far()
        generation = self._generation
        return GenerateAnswer(
            text=generation.text,
            output_ids=generation.output_ids,
            meta_info=meta_info(generation, with_timeline=self._with_timeline, logprobs=logprobs),
            index=generation.index if with_index else UNSET,
        )
