"""`POST /generate`, the native API, with SGLang's fields and answers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from router.fields import Fields, parse_object, shown
from router.generation import Generation, GenerationGroup, Generator, Prompt
from router.logprobs import NativeLogprobs, check_num_native, check_start_len, read_native_logprobs
from router.responses import json_response, read_body, stream_response, while_connected
from router.sampling import NATIVE, Sampling, check_batch_size, read_sampling
from router.scheduling_hints import read_hints
from router.served_model import ModelSlot, ServedModel
from router.tokenizer import Tokenizer
from shared.errors import RequestError

WEIGHT_VERSION = "default"
MAX_RID_CHARS = 256

_FEATURES_TO_COME: Mapping[str, Sequence[object]] = {
    "return_hidden_states": (False,),
    "lora_path": (),
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "custom_logit_processor": (),
    "session_params": ({},),
}


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Bounds on what one HTTP request may ask for."""

    max_body_bytes: int
    max_batch_size: int


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A checked body of /generate."""

    prompts: list[Prompt]
    as_list: bool
    stream: bool
    with_timeline: bool
    with_logprob_text: bool


def generate_routes(generator: Generator, model: ModelSlot, limits: HttpLimits) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.put("/generate", response_model=None, include_in_schema=False)
    @router.post("/generate", response_model=None)
    async def generate(request: Request) -> Response:
        """Complete one prompt or several."""
        fields = parse_object(await read_body(request, limits.max_body_bytes))
        asked = await read_generate(fields, model.get(), limits, request.headers)
        group = generator.open(asked.prompts, model.get().tokenizer)
        if asked.stream:
            return await stream_response(request, _events(group, asked, model.get().tokenizer))
        answer = _answer(group, asked, model.get().tokenizer)
        return json_response(await while_connected(request.receive, answer))

    return router


async def read_generate(
    fields: Fields, model: ServedModel, limits: HttpLimits, headers: Mapping[str, str]
) -> GenerateRequest:
    """Check a body and tokenize it. Raises RequestError."""
    fields.refuse(_FEATURES_TO_COME, "not supported yet")
    texts, ids, batched = _read_prompts(fields, model.vocab_size)
    num_prompts = len(texts or ids)
    check_batch_size(num_prompts, limits.max_batch_size)
    samplings = _read_samplings(fields, num_prompts, batched, model.vocab_size)
    check_batch_size(sum(sampling.n for sampling in samplings), limits.max_batch_size)
    rids = read_rids(fields, num_prompts, batched)
    extra_key = read_extra_key(fields)
    hints = read_hints(fields, headers)
    stream, with_timeline = fields.boolean("stream", False), fields.boolean("return_timeline", False)
    with_logprob_text = fields.boolean("return_text_in_logprobs", False)
    logprobs = read_native_logprobs(fields, num_prompts, batched, model.vocab_size)
    if texts:
        ids = await model.tokenizer.encode(texts)
    for at, input_ids in enumerate(ids):
        if not input_ids:
            where = f"prompt {at}" if batched else "the prompt"
            raise RequestError(f"{where} has no tokens", param="text" if texts else "input_ids")
        check_start_len(logprobs[at], len(input_ids), f"prompt {at}: " if batched else "")
    prompts = [
        Prompt(
            rid=rid,
            input_ids=tuple(input_ids),
            sampling=sampling.judged(wanted),
            extra_key=extra_key,
            hints=hints,
        )
        for rid, input_ids, sampling, wanted in zip(rids, ids, samplings, logprobs, strict=True)
    ]
    check_num_native(prompts)
    as_list = batched or len(prompts) > 1 or samplings[0].n > 1
    return GenerateRequest(
        prompts=prompts,
        as_list=as_list,
        stream=stream,
        with_timeline=with_timeline,
        with_logprob_text=with_logprob_text,
    )


def meta_info(generation: Generation, *, with_timeline: bool) -> dict[str, object]:
    """What is told about a sequence beside its text."""
    req = generation.req
    known: dict[str, object] = {
        "id": generation.prompt.rid,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": req.prompt_len,
        "completion_tokens": len(generation.output_ids),
        "cached_tokens": req.cached_tokens,
        "weight_version": WEIGHT_VERSION,
    }
    if req.ended_at is not None:
        known["e2e_latency"] = req.ended_at - req.started_at
    if with_timeline:
        known |= timeline_fields(generation)
    return known


def timeline_fields(generation: Generation) -> dict[str, object]:
    """The stages known so far, in order of time. A node tells them with its first token and with its last."""
    return {
        "timeline": [{"role": s.role, "stage": s.stage, "time": s.time} for s in generation.timeline],
        "kv_pages_transferred": generation.req.kv_pages_transferred,
        "kv_bytes_transferred": generation.req.kv_bytes_transferred,
    }


async def _answer(group: GenerationGroup, asked: GenerateRequest, tokenizer: Tokenizer) -> object:
    with group:
        generations = await group.finished()
        answers = [await _Output(generation, asked, tokenizer).so_far() for generation in generations]
    return answers if asked.as_list else answers[0]


async def _events(
    group: GenerationGroup, asked: GenerateRequest, tokenizer: Tokenizer
) -> AsyncGenerator[object, None]:
    outputs = [_Output(generation, asked, tokenizer) for generation in group.generations]
    with group:
        async for generation, _ in group.steps():
            event = await outputs[generation.index].so_far()
            if asked.as_list:
                event["index"] = generation.index
            yield event


class _Output:
    """What the client sees of one sequence."""

    def __init__(self, generation: Generation, asked: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._with_timeline = asked.with_timeline
        text_of = tokenizer.token_text if asked.with_logprob_text else None
        self._logprobs = NativeLogprobs(generation, text_of)

    async def so_far(self) -> dict[str, object]:
        """To be encoded before the next call."""
        generation = self._generation
        return {
            "text": generation.text,
            "output_ids": generation.output_ids,
            "meta_info": {
                **meta_info(generation, with_timeline=self._with_timeline),
                **await self._logprobs.so_far(),
            },
        }


def _read_prompts(fields: Fields, vocab_size: int) -> tuple[list[str], list[list[int]], bool]:
    """Texts or ids, whichever was given, and whether as a list of prompts."""
    text, input_ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (input_ids is None):
        raise RequestError("give exactly one of text and input_ids", param="text")
    if text is not None:
        if isinstance(text, str):
            return [text], [], False
        texts = text if isinstance(text, list) else []
        if not texts or not all(isinstance(t, str) for t in texts):
            raise fields.wrong("text", "a string or a list of strings")
        return texts, [], True
    rows, batched = read_ids(fields, "input_ids", vocab_size)
    return [], rows, batched


def read_ids(fields: Fields, field: str, vocab_size: int) -> tuple[list[list[int]], bool]:
    """A list of token ids, or a list of such lists; and whether it was the latter."""
    value = fields.raw(field)
    if not isinstance(value, list) or not value:
        raise fields.wrong(field, "a list of token ids, or a list of such lists")
    batched = isinstance(value[0], list)
    rows = value if batched else [value]
    for at, row in enumerate(rows):
        name = f"{field}[{at}]" if batched else field
        if not isinstance(row, list) or not all(type(i) is int for i in row):
            raise RequestError(f"{name} must be a list of token ids, not {shown(row)}", param=field)
        if row and (min(row) < 0 or max(row) >= vocab_size):
            outside = next(i for i in row if not 0 <= i < vocab_size)
            raise RequestError(
                f"{name} must hold token ids from 0 to {vocab_size - 1}, not {shown(outside)}", param=field
            )
    return rows, batched


def read_rids(fields: Fields, num_prompts: int, batched: bool) -> list[str]:
    """A name for each prompt: the client's, numbered where one string names a batch, or a random one."""
    value = fields.raw("rid")
    if value is None:
        return [uuid.uuid4().hex for _ in range(num_prompts)]
    given = fields.strings("rid", max_count=num_prompts, max_chars=MAX_RID_CHARS)
    if isinstance(value, str):
        return [f"{value}_{i}" for i in range(num_prompts)] if batched else [value]
    if len(given) != num_prompts:
        raise fields.wrong("rid", f"a string or a list of {num_prompts}, one for each prompt")
    return list(given)


def read_extra_key(fields: Fields) -> str:
    """Separates namespaces of the RadixCache: prompts with different keys share nothing."""
    return fields.string("extra_key", max_chars=MAX_RID_CHARS) or ""


def _read_samplings(fields: Fields, num_prompts: int, batched: bool, vocab_size: int) -> list[Sampling]:
    value = fields.raw("sampling_params")
    if not isinstance(value, list):
        return [
            read_sampling(fields.nested("sampling_params"), NATIVE, vocab_size) for _ in range(num_prompts)
        ]
    if not batched or len(value) != num_prompts or not all(v is None or isinstance(v, dict) for v in value):
        expected = f"an object, or a list of {num_prompts} objects" if batched else "an object"
        raise fields.wrong("sampling_params", expected)
    return [
        read_sampling(Fields(row or {}, f"sampling_params[{at}]"), NATIVE, vocab_size)
        for at, row in enumerate(value)
    ]
