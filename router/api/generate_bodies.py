"""The body of /generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from router.http.body import NOT_YET, Body, FailFast, OneOf, about, one_or_more
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
from router.request.sampling import NewTokens, SamplingBody, Seed
from shared.protocol.logprobs import MAX_TOKEN_IDS_LOGPROB, OUTPUTS_ONLY

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
