"""The bodies of OpenAI's routes: completions, and chats with messages, tools, and the choice of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from router.http.body import NOT_YET, Body, FailFast, OneOf, about, text_or
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
from router.request.sampling import MAX_CHOICES, JsonSchema, NewTokens, SamplingBody

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(Body):
    """The usage that a stream has beside the text."""

    include_usage: bool = about("A last event with the usage.", False)
    continuous_usage_stats: bool = about("The usage so far in every event.", False)


class NamedSchema(Body):
    """`response_format.json_schema`."""

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
        "Longest answer; -1 is as if it were left out. Newer name: `max_completion_tokens`.",
        None,
        validation_alias=AliasChoices("max_tokens", "max_completion_tokens"),
    )
    min_new_tokens: NewTokens = about("Nothing ends it before.", 0, alias="min_tokens")
    response_format: ResponseFormat | None = about("Asks for JSON.", None)
    stream: bool = about("Send events, each with what is new.", False)
    stream_options: StreamOptions | None = about("For a stream.", None)
    return_timeline: ReturnTimeline = False
    rid: Rids = None
    priority: Priority = 0
    routing_key: RoutingKey = None
    extra_key: ExtraKey = about("Requests with different keys share no cache.", "")
    no_stop_trim: bool = about(
        "What matched stays in the text. vLLM's name: `include_stop_str_in_output`.",
        False,
        validation_alias=AliasChoices("no_stop_trim", "include_stop_str_in_output"),
    )
    refused: ClassVar[Mapping[str, str]] = {
        **SamplingBody.refused,
        **dict.fromkeys(
            (
                *("lora_path", "return_hidden_states", "return_routed_experts", "return_token_ids"),
                *("prompt_embeds", "session_params", "custom_logit_processor", "data_parallel_rank"),
            ),
            NOT_YET,
        ),
        "bootstrap_host": CHOSEN_HERE,
        "cache_salt": "called extra_key here",
    }


class CompletionBody(OpenAIBody):
    """One prompt or several, to be completed."""

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
    refused: ClassVar[Mapping[str, str]] = {**OpenAIBody.refused, "suffix": NOT_YET}


MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024

FunctionName = Annotated[str, about("Of the function.", min_length=1, max_length=256)]


class AsSent(Body):
    """An object that the chat template gets as the client sent it, with its unknown fields, in their order."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, values: Any, handler: ModelWrapValidatorHandler[AsSent]) -> AsSent:
        body = handler(values)
        body._sent = values
        return body

    @property
    def sent(self) -> dict[str, Any]:
        """The fields that are not null. Some clients send null for absent fields, which confuses some templates."""
        return {name: value for name, value in self._sent.items() if value is not None}


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"] = about("Only text is served.")
    text: str = about("Follows the part before it without a gap.")


class CalledFunction(AsSent):
    """The function that was called, and its arguments."""

    name: FunctionName
    arguments: Annotated[
        str | dict[str, Any] | None,
        OneOf("an object, or one as JSON in a string", {"str": str, "dict": dict[str, Any]}),
    ] = about("JSON in a string, or an object; the chat template gets an object.", None)


class EarlierCall(AsSent):
    """A call that the assistant has made."""

    id: str | None = about("Named by the tool's answer.", None, max_length=256)
    type: Literal["function"] = about("Only functions are served.", "function")
    function: CalledFunction = about("What was called.")


class ChatInputMessage(AsSent):
    """One message. Its unknown fields are for the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = about(
        "The author. developer becomes system, unless the template has it."
    )
    content: Annotated[
        str | list[TextPart] | None, text_or("a string or a list of parts", TextPart, MAX_PARTS)
    ] = about("Text, or parts of it; an assistant's message may have none.", None)
    tool_calls: list[EarlierCall] | None = about(
        "Calls in an assistant's message.", None, max_length=MAX_TOOLS
    )
    tool_call_id: str | None = about("The call that a tool's message answers.", None, max_length=256)


class Function(AsSent):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = about("For the chat template.", None)
    parameters: dict[str, Any] | None = about("The JSON schema of its arguments.", None)
    strict: bool = about("Has no effect: a call that is forced keeps to the schema.", False)


class Tool(AsSent):
    """A tool, for the chat template to show."""

    type: Literal["function"] = about("Only functions are served.")
    function: Function = about("What may be called.")


class NamedFunction(Body):
    """The function to call."""

    name: FunctionName


class NamedTool(Body):
    """The tool to call."""

    type: Literal["function"] = about("Only functions are served.")
    function: NamedFunction = about("Which one.")


class SomeTools(Body):
    """Tools that may be called, of those that the model sees."""

    mode: Literal["auto", "required"] = about("As for `tool_choice`.")
    tools: Annotated[list[NamedTool], FailFast()] = about("Which ones.", min_length=1, max_length=MAX_TOOLS)


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"] = about("As OpenAI names it.")
    allowed_tools: SomeTools = about("Which ones.")


class ChatBody(OpenAIBody):
    """A conversation, to be continued by the assistant."""

    messages: Annotated[list[ChatInputMessage], FailFast()] = about(
        "The conversation so far.", min_length=1, max_length=MAX_MESSAGES
    )
    logprobs: bool = about("Tell the logprobs of tokens.", False)
    top_logprobs: TopNum = about("And of so many of the likeliest.", 0)
    tools: Annotated[list[Tool] | None, FailFast()] = about(
        "Shown by the chat template, whatever `tool_choice` is.", None, max_length=MAX_TOOLS
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
        OneOf(
            "none, auto, required, {'type': 'function', 'function': {'name': ...}} or {'type': 'allowed_tools', "
            "'allowed_tools': {'mode': ..., 'tools': [...]}}",
            {
                "str": Literal["none", "auto", "required"],
                "dict": NamedTool,
                "dict[allowed_tools]": AllowedTools,
            },
        ),
    ] = about(
        "auto, the default beside tools: the model decides, and its calls are read in its own "
        "syntax. none: the answer is text. required, or a function by name: the answer is such a call, which a "
        "grammar guarantees. allowed_tools: auto or required, for some of the tools.",
        None,
    )
    parallel_tool_calls: bool = about(
        "False: calls behind the first are left out. A call of a named function is always one.", True
    )
    documents: list[dict[str, Any]] | None = about("For the chat template.", None, max_length=MAX_DOCUMENTS)
    chat_template_kwargs: dict[str, Any] | None = about("Variables for the chat template.", None)
    add_generation_prompt: bool | None = about(
        "The prompt ends where the assistant begins. True, unless continued.", None
    )
    continue_final_message: bool = about("The answer goes on with the last message.", False)
    function_call: Literal["none"] | None = about("Older name of `tool_choice`.", None)
    reasoning_effort: Effort | None = about(
        "A variable for the chat template; none also turns reasoning off where it can.", None
    )
    include_reasoning: bool = about("False: the answer is without the reasoning.", True)
    separate_reasoning: bool = about(
        "False: reasoning is a part of the content, as the model writes it.", True
    )
    modalities: list[Literal["text"]] | None = about("Only text is served.", None)
    verbosity: Literal["medium"] | None = about("The only one that is served.", None)
    refused: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.refused,
        "add_special_tokens": "not for a chat, where the template writes all special tokens",
        "chat_template": "the server's to choose",
        "functions": "not supported: use tools",
        "reasoning": "not supported: use reasoning_effort",
        "audio": NOT_YET,
        "prediction": NOT_YET,
        "web_search_options": NOT_YET,
    }
