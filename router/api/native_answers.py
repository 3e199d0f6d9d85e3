"""What SGLang's native routes answer, with SGLang's names."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from router.http.answer import Answer, TimelineFields
from router.request.finish_reason import FinishReason

JudgedToken = Annotated[
    tuple[float | None, int, str | None],
    Meta(
        description="Logprob (null where nothing comes before), token id, and the text where it was asked for."
    ),
]
JudgedTokens = list[JudgedToken]
Alternatives = Annotated[
    list[JudgedTokens | None], Meta(description="For each token; null where nothing comes before.")
]


class MetaInfo(TimelineFields, kw_only=True, frozen=True):
    """What is told about a sequence beside its text. Logprobs come with `return_logprob`."""

    id: Annotated[str, Meta(description="The prompt's rid.")]
    finish_reason: Annotated[FinishReason | None, Meta(description="Null while it runs.")]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Annotated[int, Meta(description="Prompt tokens found in a RadixCache.")]
    weight_version: str
    e2e_latency: Annotated[float | UnsetType, Meta(description="Seconds, once it has ended.")] = UNSET
    input_token_logprobs: JudgedTokens | UnsetType = UNSET
    output_token_logprobs: JudgedTokens | UnsetType = UNSET
    input_top_logprobs: Alternatives | UnsetType = UNSET
    output_top_logprobs: Alternatives | UnsetType = UNSET
    input_token_ids_logprobs: Alternatives | UnsetType = UNSET
    output_token_ids_logprobs: Alternatives | UnsetType = UNSET


class GenerateAnswer(Answer, kw_only=True, frozen=True):
    """One sequence; in a stream, all of it so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: Annotated[
        int | UnsetType, Meta(description="In the events of a batch: which sequence, grouped by prompt.")
    ] = UNSET
