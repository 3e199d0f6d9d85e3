"""The answers and events of the two OpenAI routes, made from a request's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from router.api.generate_api import timeline_fields
from router.api.logprobs import ScoredText, chat_logprobs
from router.api.openai_answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCallDelta,
    PromptTokensDetails,
    ToolCallDelta,
    Usage,
)
from router.api.tool_calls import CallReader, ForcedCall
from router.http.answer import Answer
from router.request.finish_reason import StopReason, kind_of
from router.request.generation import Generation
from router.text.tokenizer import Tokenizer

MaybeUsage = Usage | UnsetType
_NOTHING = ChatDelta()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The fields that all events and the answer of one request have in common."""

    id: str
    created: int
    model: str
    with_logprobs: bool
    with_timeline: bool

    @property
    def head(self) -> dict[str, Any]:
        """The fields of every event."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def timeline(self, generation: Generation) -> dict[str, Any]:
        """The timeline fields of a choice, if the client asked for them."""
        return timeline_fields(generation) if self.with_timeline else {}


class Shape(Protocol):
    """Makes the answers of one of the two routes."""

    def opening(self, generation: Generation, usage: MaybeUsage) -> Answer | None:
        """The event before any text of a sequence, if the route has one."""
        ...

    def delta(self, generation: Generation, text: str, first: int, usage: MaybeUsage) -> Answer | None:
        """The event for more text, and for the logprobs of the output tokens from `first` on.

        None while the text adds nothing to the answer; a later event then has those logprobs.
        """
        ...

    def closing(self, usage: Usage) -> Answer:
        """The last event, which has the usage alone."""
        ...

    def whole(self, generations: Sequence[Generation], usage: Usage) -> Answer:
        """All sequences in one answer, in the order of their choices."""
        ...


class CompletionShape:
    """/v1/completions. `echoes` are the prompts' texts if the client wants them before the output."""

    def __init__(self, reply: Reply, tokenizer: Tokenizer, echoes: Sequence[str] | None) -> None:
        self._reply = reply
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._scored: dict[int, ScoredText] = {}

    def opening(self, generation: Generation, usage: MaybeUsage) -> Answer | None:
        """The event with the echoed prompt; None without `echo`."""
        if self._echoes is None:
            return None
        choice = CompletionChoice(
            index=generation.index,
            text=self._echo(generation),
            logprobs=self._logprobs(generation, prompt=True),
            **self._reply.timeline(generation),
        )
        return self._event([choice], usage)

    def delta(self, generation: Generation, text: str, first: int, usage: MaybeUsage) -> Answer:
        """The event for more text."""
        logprobs = self._logprobs(generation, output_from=first)
        return self._event([self._choice(generation.index, generation, text, logprobs)], usage)

    def closing(self, usage: Usage) -> Answer:
        """The event for the usage alone."""
        return self._event([], usage)

    def whole(self, generations: Sequence[Generation], usage: Usage) -> Answer:
        """All sequences in one answer."""
        choices = [
            self._choice(
                index,
                g,
                self._echo(g) + g.text,
                self._logprobs(g, prompt=self._echoes is not None, output_from=0),
            )
            for index, g in enumerate(generations)
        ]
        return self._event(choices, usage)

    def _event(self, choices: list[CompletionChoice], usage: MaybeUsage) -> Completion:
        return Completion(**self._reply.head, choices=choices, usage=usage)

    def _choice(
        self, index: int, generation: Generation, text: str, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            **_end(generation),
            **self._reply.timeline(generation),
        )

    def _echo(self, generation: Generation) -> str:
        return self._echoes[generation.prompt_index] if self._echoes is not None else ""

    def _logprobs(
        self, generation: Generation, *, prompt: bool = False, output_from: int | None = None
    ) -> CompletionLogprobs | None:
        if not self._reply.with_logprobs:
            return None
        scored = self._scored.get(generation.index)
        if scored is None:
            echo = self._echo(generation) if self._echoes is not None else None
            scored = self._scored[generation.index] = ScoredText(generation, self._tokenizer, echo)
        return scored.logprobs(prompt=prompt, output_from=output_from)


class ChatShape:
    """/v1/chat/completions. With a `call`, the text of each sequence is the call of a tool."""

    def __init__(self, reply: Reply, tokenizer: Tokenizer, call: ForcedCall | None) -> None:
        self._reply = reply
        self._tokenizer = tokenizer
        self._call = call
        self._readers: dict[int, CallReader] = {}
        self._named: set[int] = set()

    def opening(self, generation: Generation, usage: MaybeUsage) -> Answer | None:
        """The event with the role."""
        content = "" if self._call is None else None
        delta = ChatDelta(role="assistant", content=content, refusal=None)
        timeline = self._reply.timeline(generation)
        return self._chunk([ChatChunkChoice(index=generation.index, delta=delta, **timeline)], usage)

    def delta(self, generation: Generation, text: str, first: int, usage: MaybeUsage) -> Answer | None:
        """The event for more text; None while the text is only what the grammar puts before a call."""
        more = self._more(generation, text)
        if more == _NOTHING and generation.finish_reason is None:
            return None
        choice = ChatChunkChoice(
            index=generation.index,
            delta=more,
            logprobs=self._logprobs(generation, first),
            **self._end(generation),
            **self._reply.timeline(generation),
        )
        return self._chunk([choice], usage)

    def closing(self, usage: Usage) -> Answer:
        """The event for the usage alone."""
        return self._chunk([], usage)

    def whole(self, generations: Sequence[Generation], usage: Usage) -> Answer:
        """All sequences in one answer."""
        choices = [
            ChatChoice(
                index=index,
                message=self._message(generation),
                logprobs=self._logprobs(generation, 0),
                **self._end(generation),
                **self._reply.timeline(generation),
            )
            for index, generation in enumerate(generations)
        ]
        return ChatCompletion(**self._reply.head, choices=choices, usage=usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: MaybeUsage) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._reply.head, choices=choices, usage=usage)

    def _message(self, generation: Generation) -> ChatMessage:
        if self._call is None:
            return ChatMessage(content=generation.text)
        call = self._call.reader().whole(generation.text)
        # A text that ends before the function's name is only what the grammar puts before it.
        return ChatMessage(content=None, tool_calls=[call] if call else UNSET)

    def _more(self, generation: Generation, text: str) -> ChatDelta:
        if self._call is None:
            return ChatDelta(content=text or UNSET)
        reader = self._readers.get(generation.index)
        if reader is None:
            reader = self._readers[generation.index] = self._call.reader()
        arguments = reader.feed(text, last=generation.finish_reason is not None)
        if reader.name is None:
            return _NOTHING
        if generation.index in self._named:
            more = ToolCallDelta(function=FunctionCallDelta(arguments=arguments))
            return ChatDelta(tool_calls=[more] if arguments else UNSET)
        self._named.add(generation.index)
        function = FunctionCallDelta(name=reader.name, arguments=arguments)
        return ChatDelta(tool_calls=[ToolCallDelta(id=reader.id, type="function", function=function)])

    def _end(self, generation: Generation) -> dict[str, Any]:
        end = _end(generation)
        complete = end["finish_reason"] == "stop" and self._call is not None
        return {**end, "finish_reason": self._call.finish_reason} if complete and self._call else end

    def _logprobs(self, generation: Generation, first: int) -> ChatLogprobs | None:
        return chat_logprobs(generation, first, self._tokenizer) if self._reply.with_logprobs else None


def usage_of(generations: Sequence[Generation]) -> Usage:
    """The tokens so far. A prompt counts once, however many choices it has."""
    first_choices = [g for g in generations if g.choice == 0]
    prompt_tokens = sum(g.req.prompt_len for g in first_choices)
    completion_tokens = sum(len(g.output_ids) for g in generations)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(g.req.cached_tokens for g in first_choices)
        ),
    )


def best(generations: Sequence[Generation], n: int) -> list[Generation]:
    """The `n` sequences of each prompt with the highest mean logprob, best first. Equal ones keep their order."""
    by_prompt: dict[int, list[Generation]] = {}
    for generation in generations:
        by_prompt.setdefault(generation.prompt_index, []).append(generation)
    ranked = (sorted(choices, key=_mean_logprob, reverse=True)[:n] for choices in by_prompt.values())
    return [generation for choices in ranked for generation in choices]


def _mean_logprob(generation: Generation) -> float:
    logprobs = [known.logprob for known in generation.output_logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _end(generation: Generation) -> dict[str, Any]:
    """`finish_reason` and `matched_stop`, both null while the sequence runs."""
    reason = generation.finish_reason
    return {
        "finish_reason": None if reason is None else kind_of(reason),
        "matched_stop": reason.matched if isinstance(reason, StopReason) else None,
    }
