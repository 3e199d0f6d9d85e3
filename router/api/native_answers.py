"""The answers of SGLang's native routes, with SGLang's names."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from router.dispatch.stages import Start
from router.http.answer import Answer
from router.request.output_text import FinishReason

ScoredToken = Annotated[
    tuple[float | None, int, str | None],
    Meta(
        description="Logprob (null where nothing comes before), token id, and the text where it was asked for."
    ),
]
ScoredTokens = list[ScoredToken]
Alternatives = Annotated[
    list[ScoredTokens | None], Meta(description="For each token; null where nothing comes before.")
]


class StampAnswer(Answer, kw_only=True, frozen=True):
    """A stage that a request entered."""

    role: Annotated[str, Meta(description="router, prefill or decode.")]
    stage: str
    time: Annotated[float, Meta(description="Seconds since 1970, by the clock of that machine.")]


class TimelineFields(Answer, frozen=True):
    """The fields that `return_timeline` adds. In a stream they grow with each event.

    `first_token` is there once the nodes have reported every stage up to the second token.
    """

    timeline: list[StampAnswer] | UnsetType = UNSET
    first_token: Start | UnsetType = UNSET
    kv_pages_transferred: int | UnsetType = UNSET
    kv_bytes_transferred: int | UnsetType = UNSET


class MetaInfo(TimelineFields, kw_only=True, frozen=True):
    """The facts about a sequence beside its text. Logprobs come with `return_logprob`."""

    id: Annotated[str, Meta(description="The prompt's rid.")]
    finish_reason: Annotated[FinishReason | None, Meta(description="Null while it runs.")]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Annotated[int, Meta(description="Prompt tokens found in a RadixCache.")]
    weight_version: str
    e2e_latency: Annotated[float | UnsetType, Meta(description="Seconds, once it has ended.")] = UNSET
    input_token_logprobs: ScoredTokens | UnsetType = UNSET
    output_token_logprobs: ScoredTokens | UnsetType = UNSET
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
