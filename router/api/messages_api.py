"""`/v1/messages`: Anthropic's API, for its clients. A request becomes a chat's body, and is read and run as one.

Reasoning is a `thinking` block, whose signature is empty, since nothing has to be proved to this server. Prompts are
always cached, so `cache_control` has no effect, and its price is zero: no tokens are told as written to a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from fastapi import APIRouter, Request, Response

from router.api.openai_bodies import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from router.api.openai_requests import chat_body, count_prompt_tokens, read_chat
from router.api.openapi import new_routes
from router.api.reply_blocks import NAMED_EVENTS, Block, BlockShape, Change, Event, ReplyBlocks
from router.http.body import NOT_YET, Body, FailFast, about, text_or
from router.http.responses import (
    ANTHROPIC_PATH,
    StreamForm,
    answers,
    anthropic_error,
    json_response,
    while_connected,
)
from router.http.wording import wrong
from router.request.admission import AdmissionOfRequest
from router.request.generation import Desk, Generation
from router.request.output_text import StopReason, kind_of
from router.request.sampling import NewTokens, StopString

_Blocks = Annotated[
    str | list[dict[str, Any]], text_or("a string or a list of blocks", dict[str, Any], MAX_PARTS)
]


_BLOCK = (
    "a block of type text (with text), thinking (thinking), redacted_thinking, tool_use (id, name, input) or "
    "tool_result (tool_use_id, content)"
)


class InputMessage(Body):
    """One turn."""

    role: Literal["user", "assistant"] = about("The author.")
    content: _Blocks = about(
        "Text, or blocks of it (text), of reasoning (thinking), tool_use and tool_result."
    )


class Thinking(Body):
    """Whether the model reasons first."""

    type: Literal["enabled", "disabled", "adaptive"] = about("Told to the template.")


class CountBody(Body):
    """A conversation."""

    model: str | None = about("The served one.", None, max_length=1024)
    messages: Annotated[list[InputMessage], FailFast()] = about(
        "The conversation so far.", min_length=1, max_length=MAX_MESSAGES
    )
    system: _Blocks = about("Comes before the conversation.", "")
    tools: list[dict[str, Any]] | None = about("May be called.", None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = about("auto by default; any: the model must call one.", None)
    thinking: Thinking | None = about("The template's own default if left out.", None)
    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "not supported: a client calls its servers itself",
        "container": NOT_YET,
    }

    def chat(self) -> dict[str, Any]:
        """As the body of a chat."""
        system = _text(self.system, "system")
        messages = [{"role": "system", "content": system}] if system else []
        for at, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{at}].content")
        choice = self.tool_choice or {}
        return {
            "model": self.model,
            "messages": messages,
            "tools": [_chat_tool(tool) for tool in self.tools or ()],
            "tool_choice": _chat_choice(choice),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "reasoning_effort": "none" if self.thinking and self.thinking.type == "disabled" else None,
            "chat_template_kwargs": {"enable_thinking": True, "thinking": True}
            if self.thinking and self.thinking.type == "enabled"
            else None,
        }


class MessagesBody(CountBody):
    """A conversation, to be continued by the assistant."""

    max_tokens: NewTokens = about("Longest answer.")
    stream: bool = about("Send events.", False)
    stop_sequences: list[StopString] | None = about("End the answer.", None)
    temperature: float | None = about("As in a chat.", None, ge=0, le=1e6)
    top_p: float | None = about("As in a chat.", None, gt=0, le=1)
    top_k: int | None = about("As in a chat.", None, ge=-1, le=2**63)

    def chat(self) -> dict[str, Any]:
        """As the body of a chat."""
        sampling = {
            name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")
        }
        return {**super().chat(), **sampling, "stop": self.stop_sequences}


def messages_routes(desk: Desk) -> APIRouter:
    """The routes."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {
            "description": "An error in Anthropic's form.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
        for status in ("4XX", "5XX")
    }
    router = new_routes("Anthropic", prefix=ANTHROPIC_PATH, responses=errors)

    @router.post("", responses=NAMED_EVENTS)
    async def messages(request: Request, body: MessagesBody, admission: AdmissionOfRequest) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        asked = chat_body(body.chat())
        return await desk.respond(
            request, admission, lambda intake: read_chat(asked, intake, prefix="msg_"), MessagesShape
        )

    @router.post("/count_tokens", responses=answers(dict[str, int]))
    async def count_tokens(request: Request, body: CountBody) -> Response:
        """Count the tokens of a conversation's prompt."""
        counting = count_prompt_tokens(chat_body(body.chat()), desk.slot.get(), desk.limits)
        return json_response({"input_tokens": await while_connected(request.receive, counting)})

    return router


class MessagesShape(BlockShape):
    """An answer in Anthropic's words."""

    form = StreamForm(names_events=True, error=anthropic_error)

    def begin(self, generation: Generation) -> Iterator[Event]:
        """The message without its content."""
        yield {"type": "message_start", "message": self._message(generation, [], None)}

    def change(self, change: Change) -> Iterator[Event]:
        """The events of one block."""
        kind, block, text = change
        match kind:
            case "begin":
                content = _content(block, "", {})
                yield {"type": "content_block_start", "index": block.index, "content_block": content}
            case "more":
                delta = {
                    "reasoning": {"type": "thinking_delta", "thinking": text},
                    "content": {"type": "text_delta", "text": text},
                    "call": {"type": "input_json_delta", "partial_json": text},
                }[block.kind]
                yield {"type": "content_block_delta", "index": block.index, "delta": delta}
            case "end":
                yield {"type": "content_block_stop", "index": block.index}

    def end(self, generation: Generation, told: ReplyBlocks) -> Iterator[Event]:
        """Why it ended, and its tokens."""
        message = self._message(generation, [], told)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def whole(self, generation: Generation, told: ReplyBlocks) -> Event:
        """The message."""
        return self._message(generation, told.blocks, told)

    def _message(self, generation: Generation, blocks: Sequence[Block], told: ReplyBlocks | None) -> Event:
        reason = generation.finish_reason if told is not None else None
        stop = reason.matched if isinstance(reason, StopReason) and isinstance(reason.matched, str) else None
        stop_reason = None
        if reason is not None and told is not None:
            why = {"length": "max_tokens", "abort": "refusal"}.get(kind_of(reason), "end_turn")
            why = "tool_use" if told.has_calls and why == "end_turn" else why
            stop_reason = "stop_sequence" if stop is not None else why
        cached = generation.req.cached_tokens
        return {
            "id": self._asked.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_content(block, block.text, _arguments(block)) for block in blocks],
            "stop_reason": stop_reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": generation.req.prompt_len - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": len(generation.output_ids) if told is not None else 0,
            },
        }


def _content(block: Block, text: str, arguments: object) -> Event:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "content":
            return {"type": "text", "text": text}
        case "call":
            return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}


def _arguments(block: Block) -> object:
    """The arguments of a call, as far as they came. What is no JSON is wrapped as Anthropic advises its users."""
    if block.kind != "call":
        return None
    try:
        return pydantic_core.from_json(block.text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {"INVALID_JSON": block.text}


def _text(content: object, where: str) -> str:
    """A text, or that of blocks. Raises RequestError."""
    match content:
        case str():
            return content
        case list() if all(isinstance(block, dict) and block.get("type") == "text" for block in content):
            texts = [block.get("text") for block in content]
            if all(isinstance(text, str) for text in texts):
                return "\n".join(texts)
    raise wrong(where, "a string or a list of text blocks", content)


def _chat_messages(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """A turn as messages of a chat, where each answer of a tool is a message of its own. Raises RequestError."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    answers: list[dict[str, Any]] = []
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for at, block in enumerate(message.content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass  # only another server can read it
            case {"type": "tool_use", "id": str(call_id), "name": str(name)}:
                function = {"name": name, "arguments": block.get("input") or {}}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                content = _text(block.get("content") or "", f"{where}[{at}].content")
                answers.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case _:
                raise wrong(f"{where}[{at}]", _BLOCK, block)
    if texts or thoughts or calls:
        thinking = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        called = {"tool_calls": calls} if calls else {}
        answers.append({"role": message.role, "content": "\n".join(texts), **thinking, **called})
    return answers


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as a chat's. Tools of Anthropic's own keep their types, which a chat refuses."""
    names = ("name", "description", "strict")
    function = {**{name: tool.get(name) for name in names}, "parameters": tool.get("input_schema")}
    kind = tool.get("type") or "custom"
    return {"type": "function" if kind == "custom" else kind, "function": function}


def _chat_choice(choice: dict[str, Any]) -> object:
    match choice.get("type"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            return kind
