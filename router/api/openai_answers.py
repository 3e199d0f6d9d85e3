"""The answers of the OpenAI routes, as in the official client's types.

A field that is UNSET is left out. OpenAI does not have `matched_stop`, and a model's `root` and `max_model_len`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from router.api.native_answers import TimelineFields
from router.http.answer import Answer

FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "abort"],
    Meta(
        description="stop: the model's own end, or a stop string or id. length: max_tokens or the context. "
        "tool_calls: the call that `tool_choice` required is complete. abort: by /abort_request."
    ),
]
MatchedStop = Annotated[int | str | None, Meta(description="The token id or the string that ended it.")]


class PromptTokensDetails(Answer, kw_only=True, frozen=True):
    """How many of the prompt's tokens were cached."""

    cached_tokens: Annotated[int, Meta(description="Found in a RadixCache, and so not computed again.")]


class CompletionTokensDetails(Answer, kw_only=True, frozen=True):
    """What the tokens of the answer were."""

    reasoning_tokens: int


class Usage(Answer, kw_only=True, frozen=True):
    """Tokens of all choices; a prompt counts once. With `best_of`, also those of choices that are not shown."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType, Meta(description="Of a chat.")
    ] = UNSET


# ------------------------------------------------------------------------------------------ completions
class CompletionLogprobs(Answer, kw_only=True, frozen=True):
    """One entry for each token, of the prompt too where it is echoed; nothing predicts the first of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TimelineFields, kw_only=True, frozen=True):
    """One text. `index` counts the choices of the first prompt, then those of the next."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: MatchedStop = None


class Completion(Answer, kw_only=True, frozen=True):
    """The answer of /v1/completions, and each of its events, which have no `finish_reason` but in the last ones."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType = UNSET


# ------------------------------------------------------------------------------------------------- chat
class FunctionCall(Answer, kw_only=True, frozen=True):
    """A function and its arguments, JSON in a string; in a stream the name comes once, arguments piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(Answer, kw_only=True, frozen=True):
    """A call that the client is to make. In a stream it has an `index`, and `id` and `type` come once."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class TopLogprob(Answer, kw_only=True, frozen=True):
    """A token that was likely in some place. `bytes` may be part of a character, where `token` cannot show it."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Answer, kw_only=True, frozen=True):
    """A token of the answer, and the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, kw_only=True, frozen=True):
    """The logprobs of each token of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Answer, kw_only=True, frozen=True):
    """The assistant's answer: text, calls of tools, or both; in a stream, what an event adds to it.

    `reasoning` is vLLM's name of `reasoning_content`.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(TimelineFields, kw_only=True, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    matched_stop: MatchedStop = None


class ChatCompletion(Answer, kw_only=True, frozen=True):
    """The answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunkChoice(TimelineFields, kw_only=True, frozen=True):
    """What an event adds to one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: MatchedStop = None


class ChatCompletionChunk(Answer, kw_only=True, frozen=True):
    """An event of a chat's stream. The one with the usage has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET


# ----------------------------------------------------------------------------------------------- models
class ModelCard(Answer, kw_only=True, frozen=True):
    """The model that is served."""

    id: str
    root: Annotated[str, Meta(description="What the operator gave as --model.")]
    max_model_len: Annotated[
        int, Meta(description="Tokens of prompt and output that every decode node takes.")
    ]
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "baton"


class ModelList(Answer, kw_only=True, frozen=True):
    """One model."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
