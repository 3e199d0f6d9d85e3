"""The body of /v1/chat/completions: messages, tools, and the choice of a tool."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from router.api.openai_bodies import NoEffect, OpenAIBody
from router.http.body import Body, FailFast, OneOf, Refused
from router.request.fields import TopNum

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024

FunctionName = Annotated[str, Field(min_length=1, max_length=256, description="Of the function.")]


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

    type: Annotated[Literal["text"], Field(description="Only text is served.")]
    text: Annotated[str, Field(description="Follows the part before it without a gap.")]


class CalledFunction(AsSent):
    """The function that was called, and its arguments."""

    name: FunctionName
    arguments: Annotated[
        str | dict[str, Any] | None,
        OneOf("an object, or one as JSON in a string", {"str": str, "dict": dict[str, Any]}),
        Field(description="JSON in a string, or an object; the chat template gets an object."),
    ] = None


class EarlierCall(AsSent):
    """A call that the assistant has made."""

    id: Annotated[str | None, Field(max_length=256, description="Named by the tool's answer.")] = None
    type: Annotated[Literal["function"], Field(description="Only functions are served.")] = "function"
    function: Annotated[CalledFunction, Field(description="What was called.")]


class ChatInputMessage(AsSent):
    """One message. Its unknown fields are for the chat template."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        Field(description="The author. developer becomes system, unless the template has it."),
    ]
    content: Annotated[
        str | list[TextPart] | None,
        OneOf(
            "a string or a list of parts",
            {"str": str, "list": Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)]},
        ),
        Field(description="Text, or parts of it; an assistant's message may have none."),
    ] = None
    tool_calls: Annotated[
        list[EarlierCall] | None, Field(max_length=MAX_TOOLS, description="Calls in an assistant's message.")
    ] = None
    tool_call_id: Annotated[
        str | None, Field(max_length=256, description="The call that a tool's message answers.")
    ] = None


class Function(AsSent):
    """A function that the model may call."""

    name: FunctionName
    description: Annotated[str | None, Field(description="For the chat template.")] = None
    parameters: Annotated[dict[str, Any] | None, Field(description="The JSON schema of its arguments.")] = (
        None
    )
    strict: Annotated[
        bool, Field(description="Has no effect: a call that is forced keeps to the schema.")
    ] = False


class Tool(AsSent):
    """A tool, for the chat template to show."""

    type: Annotated[Literal["function"], Field(description="Only functions are served.")]
    function: Annotated[Function, Field(description="What may be called.")]


class NamedFunction(Body):
    """The function to call."""

    name: FunctionName


class NamedTool(Body):
    """The tool to call."""

    type: Annotated[Literal["function"], Field(description="Only functions are served.")]
    function: Annotated[NamedFunction, Field(description="Which one.")]


class SomeTools(Body):
    """Tools that may be called, of those that the model sees."""

    mode: Annotated[Literal["auto", "required"], Field(description="As for `tool_choice`.")]
    tools: Annotated[
        list[NamedTool], FailFast(), Field(min_length=1, max_length=MAX_TOOLS, description="Which ones.")
    ]


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Annotated[Literal["allowed_tools"], Field(description="As OpenAI names it.")]
    allowed_tools: Annotated[SomeTools, Field(description="Which ones.")]


class ChatBody(OpenAIBody):
    """A conversation, to be continued by the assistant."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "messages": [
                        {"role": "system", "content": "Answer in one sentence."},
                        {"role": "user", "content": "Why is the sky blue?"},
                    ],
                    "max_completion_tokens": 64,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
                {
                    "messages": [{"role": "user", "content": "Is it warm in Paris?"}],
                    "tools": [
                        {
                            "type": "function",
                            "function": {
                                "name": "weather",
                                "parameters": {
                                    "type": "object",
                                    "properties": {"city": {"type": "string"}},
                                    "required": ["city"],
                                },
                            },
                        }
                    ],
                    "tool_choice": {"type": "function", "function": {"name": "weather"}},
                },
            ]
        }
    )

    messages: Annotated[
        list[ChatInputMessage],
        FailFast(),
        Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation so far."),
    ]
    logprobs: Annotated[bool, Field(description="Tell the logprobs of tokens.")] = False
    top_logprobs: Annotated[TopNum, Field(description="And of so many of the likeliest.")] = 0
    tools: Annotated[
        list[Tool] | None,
        FailFast(),
        Field(max_length=MAX_TOOLS, description="Shown by the chat template, whatever `tool_choice` is."),
    ] = None
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
        Field(
            description="auto, the default beside tools: the model decides, and its calls are read in its own "
            "syntax. none: the answer is text. required, or a function by name: the answer is such a call, which a "
            "grammar guarantees. allowed_tools: auto or required, for some of the tools."
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool, Field(description="False: calls behind the first are left out. A forced call is always one.")
    ] = True
    documents: Annotated[
        list[dict[str, Any]] | None, Field(max_length=MAX_DOCUMENTS, description="For the chat template.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables for the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="The prompt ends where the assistant begins. True, unless continued.")
    ] = None
    continue_final_message: Annotated[
        bool, Field(description="The answer goes on with the last message.")
    ] = False
    metadata: NoEffect = None
    store: NoEffect = None
    add_special_tokens: Annotated[
        Any, Refused((False,), why="not for a chat, where the template writes all special tokens")
    ] = None
    chat_template: Annotated[Any, Refused(why="the server's to choose")] = None
    functions: Annotated[Any, Refused(([],), why="not supported: use tools")] = None
    function_call: Annotated[Any, Refused(("none",), why="not supported: use tool_choice")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
        Field(description="A variable for the chat template; none also turns reasoning off where it can."),
    ] = None
    include_reasoning: Annotated[bool, Field(description="False: the answer is without the reasoning.")] = (
        True
    )
    separate_reasoning: Annotated[
        bool, Field(description="False: reasoning is a part of the content, as the model writes it.")
    ] = True
    reasoning: Annotated[Any, Refused(why="not supported: use reasoning_effort")] = None
    modalities: Annotated[Any, Refused((["text"],))] = None
    audio: Annotated[Any, Refused()] = None
    prediction: Annotated[Any, Refused()] = None
    web_search_options: Annotated[Any, Refused()] = None
    verbosity: Annotated[Any, Refused(("medium",))] = None
