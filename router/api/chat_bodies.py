"""The body of /v1/chat/completions: messages, tools, and the choice of a tool."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from router.api.openai_bodies import NoEffect, OpenAIBody
from router.http.body import Body, FailFast, OneOf, Refused, about
from router.request.fields import TopNum

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
        str | list[TextPart] | None,
        OneOf(
            "a string or a list of parts",
            {"str": str, "list": Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)]},
        ),
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
        "False: calls behind the first are left out. A forced call is always one.", True
    )
    documents: list[dict[str, Any]] | None = about("For the chat template.", None, max_length=MAX_DOCUMENTS)
    chat_template_kwargs: dict[str, Any] | None = about("Variables for the chat template.", None)
    add_generation_prompt: bool | None = about(
        "The prompt ends where the assistant begins. True, unless continued.", None
    )
    continue_final_message: bool = about("The answer goes on with the last message.", False)
    metadata: NoEffect = None
    store: NoEffect = None
    add_special_tokens: Annotated[
        Any, Refused((False,), why="not for a chat, where the template writes all special tokens")
    ] = None
    chat_template: Annotated[Any, Refused(why="the server's to choose")] = None
    functions: Annotated[Any, Refused(([],), why="not supported: use tools")] = None
    function_call: Annotated[Any, Refused(("none",), why="not supported: use tool_choice")] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = about(
        "A variable for the chat template; none also turns reasoning off where it can.", None
    )
    include_reasoning: bool = about("False: the answer is without the reasoning.", True)
    separate_reasoning: bool = about(
        "False: reasoning is a part of the content, as the model writes it.", True
    )
    reasoning: Annotated[Any, Refused(why="not supported: use reasoning_effort")] = None
    modalities: Annotated[Any, Refused((["text"],))] = None
    audio: Annotated[Any, Refused()] = None
    prediction: Annotated[Any, Refused()] = None
    web_search_options: Annotated[Any, Refused()] = None
    verbosity: Annotated[Any, Refused(("medium",))] = None
