"""The bodies of OpenAI's routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from router.http.body import Body, OneOf, Refused, about
from router.http.limits import MAX_CHOICES
from router.request.fields import (
    CHOSEN_HERE,
    AddSpecialTokens,
    ExtraKey,
    IdRows,
    Priority,
    ReturnTimeline,
    Rids,
    RoutingKey,
    Texts,
    TokenIds,
    TopNum,
)
from router.request.sampling import JsonSchema, NewTokens, SamplingBody, Seed

NoEffect = Annotated[Any, about("Taken from OpenAI's clients; has no effect.")]


class StreamOptions(Body):
    """The usage that a stream has beside the text."""

    include_usage: bool = about("A last event with the usage.", False)
    continuous_usage_stats: bool = about("The usage so far in every event.", False)


class NamedSchema(Body):
    """`response_format.json_schema`."""

    name: str | None = about("Has no effect.", None, max_length=256)
    description: str | None = about("Has no effect.", None, max_length=65_536)
    strict: bool = about("Has no effect: a schema is always kept to.", True)
    json_schema: JsonSchema = about("The JSON schema.", None, alias="schema")


UNBOUNDED = BeforeValidator(lambda number: None if number == -1 else number)
"""Some clients say -1 where they have no bound."""


class ResponseFormat(Body):
    """Asks for JSON, as OpenAI does."""

    type: Literal["text", "json_object", "json_schema"] = about(
        "Anything, some JSON object, or what `json_schema` describes."
    )
    json_schema: NamedSchema | None = about("The schema, where `type` is json_schema.", None)
    object_schema: JsonSchema = about(
        "The schema, where `type` is json_object; any by default.", None, alias="schema"
    )


class OpenAIBody(SamplingBody):
    """The fields of both routes: OpenAI's, and some of SGLang and vLLM."""

    model: str | None = about("The served one; it may be left out.", None, max_length=1024)
    max_tokens: Annotated[NewTokens | None, UNBOUNDED] = about(
        "Longest answer; -1 is as if it were left out.", None
    )
    max_completion_tokens: Annotated[NewTokens | None, UNBOUNDED] = about("Newer name of `max_tokens`.", None)
    min_tokens: NewTokens = about("Nothing ends it before.", 0)
    seed: Seed = None
    response_format: ResponseFormat | None = about("Asks for JSON.", None)
    stream: bool = about("Send events, each with what is new.", False)
    stream_options: StreamOptions | None = about("For a stream.", None)
    return_timeline: ReturnTimeline = False
    rid: Rids = None
    priority: Priority = 0
    routing_key: RoutingKey = None
    extra_key: ExtraKey = about("Requests with different keys share no cache.", "")
    user: NoEffect = None
    include_stop_str_in_output: bool = about("vLLM's name of `no_stop_trim`.", False)
    lora_path: Annotated[Any, Refused()] = None
    return_hidden_states: Annotated[Any, Refused((False,))] = None
    return_routed_experts: Annotated[Any, Refused((False,))] = None
    return_token_ids: Annotated[Any, Refused((False,))] = None
    prompt_embeds: Annotated[Any, Refused()] = None
    session_params: Annotated[Any, Refused(({},))] = None
    custom_logit_processor: Annotated[Any, Refused()] = None
    data_parallel_rank: Annotated[Any, Refused()] = None
    bootstrap_host: Annotated[Any, Refused(why=CHOSEN_HERE)] = None
    cache_salt: Annotated[Any, Refused(why="called extra_key here")] = None


class CompletionBody(OpenAIBody):
    """One prompt or several, to be completed."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
                {"prompt": ["One,", "Two,"], "n": 2, "logprobs": 3, "echo": True},
            ]
        }
    )

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        OneOf(
            "a string, a list of strings, token ids, or a list of lists of token ids",
            {
                "str": str,
                "list[str]": Texts,
                "list[int]": Annotated[TokenIds, Field(min_length=1)],
                "list[list]": IdRows,
            },
        ),
    ] = about("Text or token ids, one prompt or several.")
    add_special_tokens: AddSpecialTokens = True
    echo: bool = about("The answer begins with the prompt.", False)
    logprobs: Annotated[TopNum | None, BeforeValidator(lambda value: None if value is False else value)] = (
        about("Tell the logprobs of tokens, and of so many of the likeliest at each position.", None)
    )
    best_of: int | None = about(
        "Generate so many, and tell the `n` likeliest by mean logprob.", None, ge=1, le=MAX_CHOICES
    )
    suffix: Annotated[Any, Refused(("",))] = None
