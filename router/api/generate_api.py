"""`POST /generate`, the native API, with SGLang's fields and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET
from pydantic import Field

from router.api.logprobs import NativeLogprobs
from router.api.native_answers import GenerateAnswer, MetaInfo, StampAnswer
from router.api.openapi import new_routes
from router.http.body import NOT_YET, Body, FailFast, OneOf, about, one_or_more
from router.http.responses import DATA_ONLY, answers
from router.request.admission import AdmissionOfRequest
from router.request.fields import (
    CHOSEN_HERE,
    AddSpecialTokens,
    ExtraKey,
    IdPrompts,
    Priority,
    ReturnTimeline,
    Rids,
    RoutingKey,
    Texts,
    TokenIds,
    TopNum,
)
from router.request.generation import Asked, Desk, Generation, GenerationGroup
from router.request.prompt import (
    AnswerOptions,
    Intake,
    Prompt,
    Prompts,
    check_batch,
    check_num_logprobs,
    check_prompt,
    check_token_ids,
    read_routing_key,
    requested_rid,
)
from router.request.sampling import NewTokens, SamplingBody, Seed, read_sampling, read_samplings
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.protocol.logprobs import MAX_TOKEN_IDS_LOGPROB, OUTPUTS_ONLY, LogprobParams
from shared.protocol.messages import Work
from shared.protocol.sampling_params import SamplingParams

WEIGHT_VERSION = "default"

_ANSWERS = answers(GenerateAnswer | list[GenerateAnswer], event=GenerateAnswer)


def generate_routes(desk: Desk) -> APIRouter:
    """The route."""
    router = new_routes("SGLang")

    @router.put("/generate", responses=_ANSWERS)
    @router.post("/generate", responses=_ANSWERS)
    async def generate(request: Request, body: GenerateBody, admission: AdmissionOfRequest) -> Response:
        """Complete one prompt or several."""
        return await desk.respond(
            request,
            admission,
            lambda intake: read_generate(body, intake),
            lambda asked, model: _Native(asked, model.tokenizer),
        )

    return router


# ------------------------------------------------------------------------------------------ what is asked
_MAX_START_LEN = 2**31 - 1

StartLen = Annotated[int, Field(ge=OUTPUTS_ONLY, le=_MAX_START_LEN)]
ScoredIds = Annotated[TokenIds, Field(max_length=MAX_TOKEN_IDS_LOGPROB)]


class NativeSampling(SamplingBody):
    """`sampling_params` of /generate, with SGLang's names."""

    max_new_tokens: NewTokens = about("0 only scores the prompt.", 128)
    chosen_seed: Seed = Field(default=None, alias="sampling_seed")
    refused: ClassVar[Mapping[str, str]] = {
        **SamplingBody.refused,
        "max_tokens": "called max_new_tokens here",
        "seed": "called sampling_seed here",
        "logprobs": "called return_logprob here, beside sampling_params",
        "include_stop_str_in_output": "called no_stop_trim here",
    }
    """Names of vLLM, too."""
    add_special_tokens: None = about("A field beside sampling_params.", None)
    min_tokens: Literal[0] = about("Called min_new_tokens here.", 0)


class GenerateBody(Body):
    """A prompt or a list of prompts, with their fields. With a list, most fields may be lists too."""

    text: Annotated[
        str | list[str] | None, OneOf("a string or a list of strings", {"str": str, "list": Texts})
    ] = about("The prompt; either this or `input_ids`.", None)
    input_ids: IdPrompts | None = about("The prompt as token ids; either this or `text`.", None)
    sampling_params: Annotated[
        NativeSampling | list[NativeSampling | None] | None,
        OneOf(
            "an object, or a list of objects",
            {"dict": NativeSampling, "list": Annotated[list[NativeSampling | None], FailFast()]},
        ),
    ] = about("For all prompts, or a list with one for each.", None)
    add_special_tokens: AddSpecialTokens = True
    stream: bool = about("Send events, each with all that there is so far.", False)
    rid: Rids = None
    return_logprob: Annotated[
        bool | list[bool | None], one_or_more("true or false, or a list of them", "bool", bool | None)
    ] = about("Tell the logprobs of output tokens.", False)
    logprob_start_len: Annotated[
        int | list[int | None], one_or_more("an integer or a list of integers", "int", StartLen | None)
    ] = about("Tell those of prompt tokens too, from this position on; -1: of none.", OUTPUTS_ONLY)
    top_logprobs_num: Annotated[
        int | list[int | None], one_or_more("an integer or a list of integers", "int", TopNum | None)
    ] = about("And of so many of the likeliest tokens at each position.", 0)
    token_ids_logprob: Annotated[
        list[int] | list[list[int] | None] | None,
        OneOf(
            "a list of token ids, or a list of such lists",
            {"list[int]": ScoredIds, "list[list]": Annotated[list[ScoredIds | None], FailFast()]},
        ),
    ] = about("And of these tokens at each position.", None)
    return_text_in_logprobs: bool = about("Tell the text of each token too.", False)
    return_timeline: ReturnTimeline = False
    priority: Priority = 0
    routing_key: RoutingKey = None
    extra_key: Annotated[
        str | list[str | None] | None,
        one_or_more("a string or a list of strings", "str", ExtraKey | None),
    ] = about("Prompts with different keys share no cache.", None)
    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                *("return_hidden_states", "return_routed_experts", "return_bytes", "lora_path", "lora_id"),
                *("input_embeds", "image_data", "video_data", "audio_data", "custom_logit_processor"),
                *("session_params", "data_parallel_rank"),
            ),
            NOT_YET,
        ),
        "bootstrap_host": CHOSEN_HERE,
    }


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(Asked):
    """A checked body of /generate."""

    as_list: bool
    with_timeline: bool
    with_logprob_text: bool


async def read_generate(body: GenerateBody, intake: Intake) -> GenerateRequest:
    """Check what the types cannot, take places in the queue, and tokenize. Raises RequestError."""
    model, limits = intake.model, intake.limits
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", param="text")
    given = (
        Prompts("text", body.text) if body.text is not None else Prompts("input_ids", body.input_ids or [])
    )
    given.check(model, limits)
    asked = _samplings(body, given, model.vocab_size)
    check_batch("sampling_params", sum(options.n for _, options in asked), limits)
    given_rid = requested_rid(body.rid, intake.headers)
    rids = given.rids(given_rid)
    extra_keys = given.each("extra_key", body.extra_key, "")
    routing_key = read_routing_key(body.routing_key, intake.headers)
    logprobs = _logprobs(body, given, model.vocab_size)
    whole = given_rid if isinstance(given_rid, str) else None
    intake.admission.take(rids, [options.n for _, options in asked], whole=whole, shared=body.rid is None)
    ids = await given.encode(model, limits, add_special_tokens=body.add_special_tokens)
    for at, (input_ids, wanted) in enumerate(zip(ids, logprobs, strict=True)):
        check_prompt(input_ids, given.named(at), given.field, limits)
        _check_start_len(wanted, len(input_ids), f"prompt {at}: " if given.is_list else "")
    prompts = [
        Prompt(
            rid=rid,
            asked_in=given.field,
            work=Work(
                tuple(input_ids),
                msgspec.structs.replace(params, logprobs=wanted),
                extra_key=extra_key,
                priority=body.priority,
                routing_key=routing_key,
            ),
            options=options,
        )
        for rid, input_ids, (params, options), wanted, extra_key in zip(
            rids, ids, asked, logprobs, extra_keys, strict=True
        )
    ]
    check_num_logprobs(prompts, "logprob_start_len")
    return GenerateRequest(
        prompts=prompts,
        as_list=given.is_list or asked[0][1].n > 1,
        streams=body.stream,
        with_timeline=body.return_timeline,
        with_logprob_text=body.return_text_in_logprobs,
    )


def _samplings(
    body: GenerateBody, given: Prompts, vocab_size: int
) -> list[tuple[SamplingParams, AnswerOptions]]:
    asked = body.sampling_params
    if not isinstance(asked, list):
        of_all = asked or NativeSampling()
        bound = of_all.max_new_tokens
        return read_samplings(of_all, bound, len(given), vocab_size, "sampling_params")
    bodies = given.each("sampling_params", asked, NativeSampling())
    return [
        read_sampling(params, params.max_new_tokens, vocab_size, f"sampling_params[{at}]")
        for at, params in enumerate(bodies)
    ]


def _logprobs(body: GenerateBody, given: Prompts, vocab_size: int) -> list[LogprobParams | None]:
    """The logprobs that are asked for each prompt; None where none are. An error names the list's item."""
    wanted = given.each("return_logprob", body.return_logprob, False)
    starts = given.each("logprob_start_len", body.logprob_start_len, OUTPUTS_ONLY)
    top_nums = given.each("top_logprobs_num", body.top_logprobs_num, 0)
    ids: Any = body.token_ids_logprob or []
    if ids and not isinstance(ids[0], int):
        rows: list[list[int]] = given.each("token_ids_logprob", ids, [])
        for at, row in enumerate(rows):
            check_token_ids(f"token_ids_logprob[{at}]", row, vocab_size)
    else:  # one list for all prompts
        rows = [ids] * len(given)
        check_token_ids("token_ids_logprob", ids, vocab_size)
    return [
        LogprobParams(start_len=start_len, top_num=top_num, token_ids=tuple(row)) if asked else None
        for asked, start_len, top_num, row in zip(wanted, starts, top_nums, rows, strict=True)
    ]


def _check_start_len(wanted: LogprobParams | None, num_input_ids: int, where: str) -> None:
    """Refuse a `logprob_start_len` behind the prompt; `where` names the prompt in a batch."""
    if wanted is not None and wanted.start_len >= num_input_ids:
        raise RequestError(
            f"{where}logprob_start_len must be at most {num_input_ids - 1}, the last of {num_input_ids} prompt "
            f"tokens, not {wanted.start_len}",
            param="logprob_start_len",
        )


# ---------------------------------------------------------------------------------------- what is answered
class _Native:
    """The answer to one request, in the words of /generate."""

    form = DATA_ONLY

    def __init__(self, asked: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._workers = tokenizer.workers
        self._text_of = tokenizer.token_text if asked.with_logprob_text else None
        self._logprobs: dict[int, NativeLogprobs] = {}

    async def answer(self, group: GenerationGroup) -> object:
        """One answer, or a list of them."""
        async with group:
            answers = [await self._so_far(generation) for generation in await group.finished()]
        return answers if self._asked.as_list else answers[0]

    async def events(self, group: GenerationGroup) -> AsyncGenerator[object, None]:
        """Each with all that a sequence has so far."""
        async with group:
            async for generation, _ in group.steps():
                yield await self._so_far(generation, with_index=self._asked.as_list)

    async def _so_far(self, generation: Generation, *, with_index: bool = False) -> GenerateAnswer:
        """The answer for the output so far. Its lists grow, so it is encoded before the next call."""
        if generation.index not in self._logprobs:
            self._logprobs[generation.index] = NativeLogprobs(generation, self._workers, self._text_of)
        req = generation.req
        info = MetaInfo(
            id=generation.prompt.rid,
            finish_reason=generation.finish_reason,
            prompt_tokens=req.prompt_len,
            completion_tokens=len(generation.output_ids),
            cached_tokens=req.cached_tokens,
            weight_version=WEIGHT_VERSION,
            e2e_latency=UNSET if req.ended_at is None else req.ended_at - req.started_at,
            **(timeline_fields(generation) if self._asked.with_timeline else {}),
            **await self._logprobs[generation.index].so_far(),
        )
        return GenerateAnswer(
            text=generation.output.text,
            output_ids=generation.output_ids,
            meta_info=info,
            index=generation.index if with_index else UNSET,
        )


def timeline_fields(generation: Generation) -> dict[str, Any]:
    """The stages known so far, in order of time. A node sends its stages with its first token and with its last."""
    return {
        "timeline": [StampAnswer(role=s.role, stage=s.stage, time=s.time) for s in generation.timeline],
        "first_token": generation.req.start or UNSET,
        "kv_pages_transferred": generation.req.kv_pages_transferred,
        "kv_bytes_transferred": generation.req.kv_bytes_transferred,
    }
