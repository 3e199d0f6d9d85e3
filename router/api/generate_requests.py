"""Checks the body of /generate and turns it into prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import ConfigDict, Field

from router.dispatch.live_rids import Claim
from router.http.body import Body, FailFast, OneOf, Refused
from router.http.limits import HttpLimits
from router.http.request_ids import requested_rid
from router.request.logprob_fields import (
    LogprobStartLen,
    ReturnLogprob,
    TokenIdsLogprob,
    TopLogprobsNum,
    check_native,
    check_num_native,
    check_start_len,
    ids_of_prompts,
)
from router.request.prompt import AnswerOptions, Prompt
from router.request.prompts import (
    CHOSEN_HERE,
    ExtraKey,
    IdPrompts,
    Priority,
    ReturnTimeline,
    Rids,
    RoutingKey,
    Texts,
    encode_prompts,
    id_rows,
    per_prompt,
    read_rids,
    read_routing_key,
)
from router.request.queue_limit import QueuePlaces
from router.request.sampling import NativeSampling, read_sampling, read_samplings
from router.text.served_model import ServedModel
from shared.errors import RequestError
from shared.protocol.logprobs import OUTPUTS_ONLY, LogprobParams
from shared.protocol.messages import Work
from shared.protocol.sampling_params import SamplingParams


class GenerateBody(Body):
    """A prompt or a list of them, and what to do with it. With a list, most fields may be lists too."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "text": "The capital of France is",
                    "sampling_params": {"max_new_tokens": 16, "temperature": 0, "stop": ["\n"]},
                },
                {
                    "input_ids": [[1, 2, 3], [4, 5]],
                    "sampling_params": [{"max_new_tokens": 8}, {"max_new_tokens": 4, "top_p": 0.9}],
                    "rid": ["first", "second"],
                    "return_logprob": [True, False],
                    "stream": True,
                },
            ]
        }
    )

    text: Annotated[
        str | list[str] | None,
        OneOf("a string or a list of strings", {"str": str, "list": Texts}),
        Field(description="The prompt; either this or `input_ids`."),
    ] = None
    input_ids: Annotated[
        IdPrompts | None, Field(description="The prompt as token ids; either this or `text`.")
    ] = None
    sampling_params: Annotated[
        NativeSampling | list[NativeSampling | None] | None,
        OneOf(
            "an object, or a list of objects",
            {"dict": NativeSampling, "list": Annotated[list[NativeSampling | None], FailFast()]},
        ),
        Field(description="For all prompts, or a list with one for each."),
    ] = None
    stream: Annotated[bool, Field(description="Send events, each with all that there is so far.")] = False
    rid: Rids = None
    return_logprob: ReturnLogprob = False
    logprob_start_len: LogprobStartLen = OUTPUTS_ONLY
    top_logprobs_num: TopLogprobsNum = 0
    token_ids_logprob: TokenIdsLogprob = None
    return_text_in_logprobs: Annotated[bool, Field(description="Tell the text of each token too.")] = False
    return_timeline: ReturnTimeline = False
    priority: Priority = 0
    routing_key: RoutingKey = None
    extra_key: Annotated[
        str | list[str | None] | None,
        OneOf(
            "a string or a list of strings",
            {"str": ExtraKey, "list": Annotated[list[ExtraKey | None], FailFast()]},
        ),
        Field(description="Prompts with different keys share no cache."),
    ] = None
    return_hidden_states: Annotated[Any, Refused((False,))] = None
    return_routed_experts: Annotated[Any, Refused((False,))] = None
    return_bytes: Annotated[Any, Refused((False,))] = None
    lora_path: Annotated[Any, Refused()] = None
    lora_id: Annotated[Any, Refused()] = None
    input_embeds: Annotated[Any, Refused()] = None
    image_data: Annotated[Any, Refused(([],))] = None
    video_data: Annotated[Any, Refused(([],))] = None
    audio_data: Annotated[Any, Refused(([],))] = None
    custom_logit_processor: Annotated[Any, Refused()] = None
    session_params: Annotated[Any, Refused(({},))] = None
    data_parallel_rank: Annotated[Any, Refused()] = None
    bootstrap_host: Annotated[Any, Refused(why=CHOSEN_HERE)] = None


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A checked body of /generate."""

    prompts: list[Prompt]
    as_list: bool
    stream: bool
    with_timeline: bool
    with_logprob_text: bool


async def read_generate(
    body: GenerateBody,
    model: ServedModel,
    limits: HttpLimits,
    headers: Mapping[str, str],
    places: QueuePlaces,
    claim: Claim,
) -> GenerateRequest:
    """Check what types cannot, take places in the queue, and tokenize. Raises RequestError."""
    texts, ids, batched = _prompts(body, model.vocab_size, limits)
    num_prompts = len(texts or ids)
    field = "text" if texts else "input_ids"
    limits.check_batch_size(field, num_prompts)
    asked = _samplings(body, num_prompts, model.vocab_size, limits, batched=batched)
    limits.check_batch_size("sampling_params", sum(options.n for _, options in asked))
    given_rid = requested_rid(body.rid, headers)
    rids = read_rids(given_rid, num_prompts, batched=batched)
    extra_keys = per_prompt("extra_key", body.extra_key, "", num_prompts, batched=batched)
    routing_key = read_routing_key(body.routing_key, headers)
    logprobs = _logprobs(body, num_prompts, model.vocab_size, limits, batched=batched)
    places.hold(sum(options.n for _, options in asked))
    whole = given_rid if isinstance(given_rid, str) else None
    claim.take(rids, [options.n for _, options in asked], whole=whole, shared=body.rid is None)
    if texts:
        ids = await encode_prompts(texts, model, limits, "text", batched=batched)
    for at, input_ids in enumerate(ids):
        where = f"prompt {at}" if batched else "the prompt"
        limits.check_prompt(input_ids, where, field)
        check_start_len(logprobs[at], len(input_ids), f"prompt {at}: " if batched else "")
    prompts = [
        Prompt(
            rid=rid,
            asked_in=field,
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
    check_num_native(prompts)
    return GenerateRequest(
        prompts=prompts,
        as_list=batched or asked[0][1].n > 1,
        stream=body.stream,
        with_timeline=body.return_timeline,
        with_logprob_text=body.return_text_in_logprobs,
    )


def _prompts(
    body: GenerateBody, vocab_size: int, limits: HttpLimits
) -> tuple[list[str], list[list[int]], bool]:
    """Texts or ids, whichever was given, and whether as a list of prompts."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", param="text")
    if body.input_ids is not None:
        rows, batched = id_rows("input_ids", body.input_ids, vocab_size, limits)
        return [], rows, batched
    assert body.text is not None
    return ([body.text], [], False) if isinstance(body.text, str) else (body.text, [], True)


def _samplings(
    body: GenerateBody, num_prompts: int, vocab_size: int, limits: HttpLimits, *, batched: bool
) -> list[tuple[SamplingParams, AnswerOptions]]:
    asked = body.sampling_params
    if not isinstance(asked, list):
        return read_samplings(asked or NativeSampling(), num_prompts, vocab_size, limits, "sampling_params")
    bodies = per_prompt("sampling_params", asked, NativeSampling(), num_prompts, batched=batched)
    return [
        read_sampling(params, vocab_size, limits, f"sampling_params[{at}]")
        for at, params in enumerate(bodies)
    ]


def _logprobs(
    body: GenerateBody, num_prompts: int, vocab_size: int, limits: HttpLimits, *, batched: bool
) -> list[LogprobParams | None]:
    """What is asked about each prompt; None where nothing is."""
    wanted = per_prompt("return_logprob", body.return_logprob, False, num_prompts, batched=batched)
    starts = per_prompt(
        "logprob_start_len", body.logprob_start_len, OUTPUTS_ONLY, num_prompts, batched=batched
    )
    top_nums = per_prompt("top_logprobs_num", body.top_logprobs_num, 0, num_prompts, batched=batched)
    token_ids = ids_of_prompts(body.token_ids_logprob, num_prompts, batched=batched)
    check_native(body.top_logprobs_num, body.token_ids_logprob, vocab_size, limits)
    return [
        LogprobParams(start_len=start_len, top_num=top_num, token_ids=tuple(ids)) if asked else None
        for asked, start_len, top_num, ids in zip(wanted, starts, top_nums, token_ids, strict=True)
    ]
