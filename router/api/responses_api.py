"""`/v1/responses`: OpenAI's newer API, for its clients. A request becomes a chat's body, and is read and run as one.

No response is kept: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response

from router.api.openai_bodies import MAX_MESSAGES, MAX_TOOLS, UNBOUNDED, Effort
from router.api.openai_requests import OpenAIRequest, chat_body, read_chat
from router.api.openapi import new_routes
from router.api.reply_blocks import NAMED_EVENTS, Block, BlockShape, Change, Event, ReplyBlocks
from router.http.body import NOT_YET, Body, about, text_or
from router.http.responses import StreamForm, error_body
from router.http.wording import wrong
from router.request.admission import AdmissionOfRequest
from router.request.generation import Desk, Generation
from router.request.output_text import AbortReason, LengthReason
from router.request.sampling import NewTokens
from router.text.served_model import ServedModel
from shared.errors import RequestError


class Reasoning(Body):
    """How much the model reasons."""

    effort: Effort | None = about("As a chat's `reasoning_effort`.", None)


class TextOptions(Body):
    """About the text of the answer."""

    format: dict[str, Any] | None = about("As a chat's `response_format`; any text by default.", None)
    verbosity: Literal["medium"] | None = about("The only one that is served.", None)


_NOT_KEPT = "not supported: no response is kept, so send the whole conversation as input"


class ResponsesBody(Body):
    """A conversation, to be continued by the assistant."""

    model: str | None = about("The served one.", None, max_length=1024)
    input: Annotated[
        str | list[dict[str, Any]], text_or("a string or a list of items", dict[str, Any], MAX_MESSAGES)
    ] = about("What the user says, or the conversation: items of the types that an answer has.")
    instructions: str | None = about("A system message before the conversation.", None)
    tools: list[dict[str, Any]] | None = about("Functions that may be called.", None, max_length=MAX_TOOLS)
    tool_choice: Any = about("As a chat's; tools are named without a `function`.", None)
    parallel_tool_calls: bool = about("As a chat's.", True)
    max_output_tokens: Annotated[NewTokens | None, UNBOUNDED] = about("Longest answer.", None)
    temperature: float | None = about("As in a chat.", None, ge=0, le=1e6)
    top_p: float | None = about("As in a chat.", None, gt=0, le=1)
    reasoning: Reasoning | None = about("How much the model reasons.", None)
    text: TextOptions | None = about("Asks for JSON.", None)
    stream: bool = about("Send events.", False)
    metadata: dict[str, Any] | None = about("Is in the answer as it came.", None)
    truncation: Literal["disabled"] = about("A prompt is never cut.", "disabled")
    include: list[Literal["reasoning.encrypted_content"]] | None = about("Has no effect.", None)
    top_logprobs: Literal[0] = about("No logprobs are told.", 0)
    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _NOT_KEPT,
        "conversation": _NOT_KEPT,
        "background": NOT_YET,
        "prompt": "not supported: send the prompt itself",
    }

    def chat(self) -> dict[str, Any]:
        """As the body of a chat."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        asked = self.text.format if self.text else None
        schema = {name: value for name, value in (asked or {}).items() if name != "type"}
        return {
            "model": self.model,
            "messages": [*system, *self._messages()],
            "tools": [_chat_tool(tool) for tool in self.tools or ()],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": asked and {"type": asked.get("type"), "json_schema": schema},
            "stream": self.stream,
        }

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return _join([_chat_message(item, f"input[{at}]") for at, item in enumerate(self.input)])


def _chat_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An item as a message of a chat. Raises RequestError."""
    match item:
        case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": call_id}:
            output = _text(item.get("output"), f"{where}.output")
            return {"role": "tool", "tool_call_id": call_id, "content": output}
        case {"type": "reasoning"}:
            thought, summary = (_text(item.get(of) or "", f"{where}.{of}") for of in ("content", "summary"))
            return {"role": "assistant", "reasoning_content": thought or summary}
        case {"role": "system" | "developer" | "user" | "assistant" as role}:
            if item.get("type") in (None, "message"):
                return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    raise wrong(where, _ITEM, item)


_ITEM = (
    "an item of type message (with role and content), function_call (call_id, name, arguments), function_call_output "
    "(call_id, output) or reasoning"
)


def _join(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One message for what the assistant has reasoned, said and called in a row."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        follows = before.get("role") == message["role"] == "assistant"
        if follows and "tool_calls" in message:
            joined[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), *message["tool_calls"]]}
        elif follows and before.keys() == {"role", "reasoning_content"}:
            joined[-1] = {**before, **message}
        else:
            joined.append(message)
    return joined


_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "refusal")


def _text(parts: object, where: str) -> str:
    """A text, or that of parts. Raises RequestError."""
    if isinstance(parts, str):
        return parts
    if isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") in _PARTS for part in parts
    ):
        texts = [part.get("refusal" if part.get("type") == "refusal" else "text") for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise wrong(
        where,
        "a string or a list of parts of type input_text, output_text or refusal: only text is served",
        parts,
    )


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.get("type"), "function": {name: tool[name] for name in tool if name != "type"}}


def _chat_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(tools)}:
            allowed = {"mode": choice.get("mode", "auto"), "tools": [_chat_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice


def responses_routes(desk: Desk) -> APIRouter:
    """The route."""
    router = new_routes("OpenAI", prefix="/v1")

    @router.post("/responses", responses=NAMED_EVENTS)
    async def responses(request: Request, body: ResponsesBody, admission: AdmissionOfRequest) -> Response:
        """Answer a conversation, as OpenAI's Responses API does."""
        chat = chat_body(body.chat())

        def shape(asked: OpenAIRequest, model: ServedModel) -> ResponsesShape:
            return ResponsesShape(asked, model, _echo(body))

        return await desk.respond(
            request, admission, lambda intake: read_chat(chat, intake, prefix="resp_"), shape
        )

    return router


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What of a request its response repeats."""
    text = body.text.model_dump(exclude_unset=True) if body.text else {}
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "text": {"format": {"type": "text"}, **text},
        "truncation": "disabled",
        "background": False,
        "store": False,
    }


class ResponsesShape(BlockShape):
    """An answer in the words of the Responses API. Events are numbered."""

    def __init__(self, asked: OpenAIRequest, model: ServedModel, echo: Mapping[str, Any]) -> None:
        super().__init__(asked, model)
        self.form = StreamForm(names_events=True, error=self._error)
        head = {"id": asked.id, "object": "response", "created_at": int(time.time()), "model": model.name}
        self._head = head
        self._echo = echo
        self._numbers = itertools.count()

    def begin(self, generation: Generation) -> Iterator[Event]:
        """The response without its output."""
        response = {**self._response("in_progress", []), "usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def change(self, change: Change) -> Iterator[Event]:
        """The events of one block: those of its item, and within that of its one part."""
        kind, block, text = change
        prefix, part = _WORDS[block.kind]
        place = {"item_id": _item_id(block), "output_index": block.index}
        where = place if block.kind == "call" else {**place, "content_index": 0}
        match kind:
            case "begin":
                item = _item(block, has_begun=True)
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind != "call":
                    yield self._event("response.content_part.added", **where, part=_part(block, ""))
            case "more":
                yield self._event(f"{prefix}.delta", **where, delta=text, **_own(block))
            case "end":
                yield self._event(f"{prefix}.done", **where, **{part: block.text}, **_own(block))
                if block.kind != "call":
                    yield self._event("response.content_part.done", **where, part=_part(block, block.text))
                yield self._event("response.output_item.done", output_index=block.index, item=_item(block))

    def end(self, generation: Generation, told: ReplyBlocks) -> Iterator[Event]:
        """The response with all that it has."""
        response = self.whole(generation, told)
        yield self._event(f"response.{response['status']}", response=response)

    def whole(self, generation: Generation, told: ReplyBlocks) -> Event:
        """The response."""
        reason, status = generation.finish_reason, "completed"
        more: dict[str, Any] = {}
        if isinstance(reason, LengthReason):
            status, more = "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        elif isinstance(reason, AbortReason):
            status, more = "failed", {"error": {"code": "server_error", "message": reason.message}}
        num_input, num_output = generation.req.prompt_len, len(generation.output_ids)
        items = [_item(block) for block in told.blocks]
        usage = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": generation.req.cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": told.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }
        return {**self._response(status, items), **more, "usage": usage}

    def _response(self, status: str, output: list[Event]) -> Event:
        unknown = {"error": None, "incomplete_details": None}
        return {**self._head, "status": status, **unknown, **self._echo, "output": output}

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _error(self, error: RequestError) -> Event:
        told = error_body(error).error
        return self._event("error", code=told.code or told.type, message=told.message, param=told.param)


_WORDS = {
    "reasoning": ("response.reasoning_text", "text"),
    "content": ("response.output_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""Of each kind of block: its events, and the field of its text."""


def _item_id(block: Block) -> str:
    return {"reasoning": "rs_", "content": "msg_", "call": "fc_"}[block.kind] + block.id


def _item(block: Block, *, has_begun: bool = False) -> Event:
    """With what it has at its end, or, where it `has_begun`, with nothing yet."""
    status = "in_progress" if has_begun else "incomplete" if block.is_cut else "completed"
    head = {"id": _item_id(block), "status": status}
    text = "" if has_begun else block.text
    parts = [] if has_begun else [_part(block, text)]
    match block.kind:
        case "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": parts}
        case "content":
            return {**head, "type": "message", "role": "assistant", "content": parts}
        case "call":
            call_id = f"call_{block.id}"
            return {
                **head,
                "type": "function_call",
                "call_id": call_id,
                "name": block.name,
                "arguments": text,
            }


def _own(block: Block) -> Event:
    """What the events of one kind of block have besides."""
    match block.kind:
        case "reasoning":
            return {}
        case "content":
            return {"logprobs": []}
        case "call":
            return {"name": block.name}


def _part(block: Block, text: str) -> Event:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
