"""`/v1/...`: OpenAI's API, for its clients: the routes, and the shapes of their answers."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from router.api.generate_api import timeline_fields
from router.api.logprobs import CHARS_A_LOGPROB, ScoredText, chat_logprobs
from router.api.openai_answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    FunctionCall,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    ToolCall,
    Usage,
)
from router.api.openai_bodies import ChatBody, CompletionBody
from router.api.openai_requests import OpenAIRequest, read_chat, read_completion, unknown_model
from router.api.openapi import new_routes
from router.http.answer import Answer
from router.http.responses import DATA_ONLY, answers, json_response
from router.request.admission import AdmissionOfRequest
from router.request.generation import Desk, Generation, GenerationGroup
from router.request.output_text import LengthReason, StopReason, kind_of
from router.text.reply_parser import CallDelta, ReplyDelta, ReplyReader
from router.text.served_model import ServedModel


def openai_routes(desk: Desk, context_length: Callable[[], int]) -> APIRouter:
    """The routes. `context_length` returns the fleet's."""
    router = new_routes("OpenAI", prefix="/v1")

    @router.post("/completions", responses=answers(Completion, event=Completion))
    async def completions(request: Request, body: CompletionBody, admission: AdmissionOfRequest) -> Response:
        """Complete one prompt or several."""
        return await desk.respond(
            request, admission, lambda intake: read_completion(body, intake), CompletionShape
        )

    @router.post("/chat/completions", responses=answers(ChatCompletion, event=ChatCompletionChunk))
    async def chat_completions(request: Request, body: ChatBody, admission: AdmissionOfRequest) -> Response:
        """Answer a conversation."""
        return await desk.respond(request, admission, lambda intake: read_chat(body, intake), ChatShape)

    def model_card() -> ModelCard:
        model = desk.slot.get()
        return ModelCard(id=model.name, root=model.model, max_model_len=context_length())

    @router.get("/models", responses=answers(ModelList))
    async def models() -> Response:
        """The one model that is served."""
        return json_response(ModelList(data=[model_card()]))

    @router.get("/models/{model_id:path}", responses=answers(ModelCard))
    async def model_by_id(model_id: str) -> Response:
        """The model, by its name."""
        if model_id != desk.slot.get().name:
            raise unknown_model(model_id, desk.slot.get())
        return json_response(model_card())

    return router


# ---------------------------------------------------------------------------------------- what is answered
MaybeUsage = Usage | UnsetType
_NOTHING = ChatMessage()


class OpenAIShape:
    """Makes the answers and events of one of the two routes (a `generation.Dialect`)."""

    form = DATA_ONLY

    def __init__(self, asked: OpenAIRequest, model: ServedModel) -> None:
        self._asked = asked
        self._tokenizer = model.tokenizer
        self._head: dict[str, Any] = {"id": asked.id, "created": int(time.time()), "model": model.name}

    async def answer(self, group: GenerationGroup) -> Answer:
        """The chosen sequences in one answer."""
        async with group:
            generations, best_n = await group.finished(), self._asked.best_n
            chosen = generations if best_n is None else best(generations, best_n)
            num_logprobs = sum(one.prompt.num_input_logprobs + one.num_logprobs for one in chosen)
            make = functools.partial(self.whole, chosen, generations)
            return await self._tokenizer.workers.run(CHARS_A_LOGPROB * num_logprobs, make)

    async def events(self, group: GenerationGroup) -> AsyncGenerator[object, None]:
        """An event for all tokens of a sequence that have come."""
        options = self._asked.stream
        num_sent: dict[int, int] = {}
        async with group:
            async for generation, text in group.steps():
                usage = self.usage(group.generations) if options.continuous_usage_stats else UNSET
                first = num_sent.get(generation.index)
                if first is None:
                    first = num_sent[generation.index] = 0
                    make = functools.partial(self.opening, generation, usage)
                    num_chars = CHARS_A_LOGPROB * generation.prompt.num_input_logprobs
                    opening = await self._tokenizer.workers.run(num_chars, make)
                    if opening is not None:
                        yield opening
                if text or generation.finish_reason is not None:
                    more = self.delta(generation, text, first, usage)
                    if more is not None:
                        yield more
                        num_sent[generation.index] = len(generation.output_ids)
            if options.include_usage:
                yield self.event([], self.usage(group.generations))

    def usage(self, generations: Sequence[Generation]) -> Usage:
        """The tokens so far."""
        return usage_of(generations)

    def opening(self, generation: Generation, usage: MaybeUsage) -> Answer | None:
        """The event before any text of a sequence, if the route has one."""
        raise NotImplementedError

    def delta(self, generation: Generation, text: str, first: int, usage: MaybeUsage) -> Answer | None:
        """The event for more text, and for the logprobs of the output tokens from `first` on.

        None while the text adds nothing to the answer; a later event then has those logprobs.
        """
        raise NotImplementedError

    def event(self, choices: list[Any], usage: MaybeUsage) -> Answer:
        """An event with these choices; the last one has the usage alone."""
        raise NotImplementedError

    def whole(self, chosen: Sequence[Generation], generations: Sequence[Generation]) -> Answer:
        """The chosen sequences in one answer, in the order of their choices, with the usage of all."""
        raise NotImplementedError

    def _timeline(self, generation: Generation) -> dict[str, Any]:
        """The timeline fields of a choice, if the client asked for them."""
        return timeline_fields(generation) if self._asked.with_timeline else {}


class CompletionShape(OpenAIShape):
    """/v1/completions."""

    def __init__(self, asked: OpenAIRequest, model: ServedModel) -> None:
        super().__init__(asked, model)
        self._echoes = asked.echoes
        self._scored: dict[int, ScoredText] = {}

    def opening(self, generation: Generation, usage: MaybeUsage) -> Answer | None:
        """The event with the echoed prompt; None without `echo`."""
        if self._echoes is None:
            return None
        choice = CompletionChoice(
            index=generation.index,
            text=self._echo(generation),
            logprobs=self._logprobs(generation, prompt=True),
            **self._timeline(generation),
        )
        return self.event([choice], usage)

    def delta(self, generation: Generation, text: str, first: int, usage: MaybeUsage) -> Answer:
        """The event for more text."""
        logprobs = self._logprobs(generation, output_from=first)
        return self.event([self._choice(generation.index, generation, text, logprobs)], usage)

    def whole(self, chosen: Sequence[Generation], generations: Sequence[Generation]) -> Answer:
        """The chosen sequences in one answer."""
        choices = [
            self._choice(
                index,
                g,
                self._echo(g) + g.output.text,
                self._logprobs(g, prompt=self._echoes is not None, output_from=0),
            )
            for index, g in enumerate(chosen)
        ]
        return self.event(choices, usage_of(generations))

    def event(self, choices: list[Any], usage: MaybeUsage) -> Answer:
        """An event or the answer, with these choices."""
        return Completion(**self._head, choices=choices, usage=usage)

    def _choice(
        self, index: int, generation: Generation, text: str, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            **_end(generation),
            **self._timeline(generation),
        )

    def _echo(self, generation: Generation) -> str:
        return self._echoes[generation.prompt_index] if self._echoes is not None else ""

    def _logprobs(
        self, generation: Generation, *, prompt: bool = False, output_from: int | None = None
    ) -> CompletionLogprobs | None:
        if not self._asked.with_logprobs:
            return None
        scored = self._scored.get(generation.index)
        if scored is None:
            echo = self._echo(generation) if self._echoes is not None else None
            scored = self._scored[generation.index] = ScoredText(generation, self._tokenizer, echo)
        return scored.logprobs(prompt=prompt, output_from=output_from)


class ChatShape(OpenAIShape):
    """/v1/chat/completions. `asked.reads` makes a reader for each sequence; None: all of a text is content."""

    def __init__(self, asked: OpenAIRequest, model: ServedModel) -> None:
        super().__init__(asked, model)
        self._reads = asked.reads
        self._readers: dict[int, ReplyReader] = {}
        self._num_scored: dict[int, int] = {}
        """Of each sequence the tokens that were told, or left out, with their logprobs."""

    def opening(self, generation: Generation, usage: MaybeUsage) -> Answer | None:
        """The event with the role."""
        delta = ChatMessage(role="assistant", content="", refusal=None)
        timeline = self._timeline(generation)
        return self.event([ChatChunkChoice(index=generation.index, delta=delta, **timeline)], usage)

    def delta(self, generation: Generation, text: str, first: int, usage: MaybeUsage) -> Answer | None:
        """The event for more text; None while the text may become a call, or is only what surrounds one."""
        reader = self._reader(generation) if self._reads is not None else None
        more = self._more(generation, reader, text)
        if more == _NOTHING and generation.finish_reason is None:
            return None
        choice = ChatChunkChoice(
            index=generation.index,
            delta=more,
            logprobs=self._logprobs(generation, first, reader),
            **_end(generation, reader),
            **self._timeline(generation),
        )
        return self.event([choice], usage)

    def usage(self, generations: Sequence[Generation]) -> Usage:
        """The tokens so far, also those of reasoning."""
        reasoning_tokens = sum(reader.num_reasoning_tokens for reader in self._readers.values())
        details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        return msgspec.structs.replace(usage_of(generations), completion_tokens_details=details)

    def whole(self, chosen: Sequence[Generation], generations: Sequence[Generation]) -> Answer:
        """The chosen sequences in one answer."""
        choices = [self._choice(index, generation) for index, generation in enumerate(chosen)]
        return ChatCompletion(**self._head, choices=choices, usage=self.usage(generations))

    def _reader(self, generation: Generation) -> ReplyReader | None:
        if generation.index not in self._readers and self._reads is not None:
            self._readers[generation.index] = self._reads.reader()
        return self._readers.get(generation.index)

    def event(self, choices: list[Any], usage: MaybeUsage) -> Answer:
        """An event with these choices."""
        return ChatCompletionChunk(**self._head, choices=choices, usage=usage)

    def _choice(self, index: int, generation: Generation) -> ChatChoice:
        reader = self._reader(generation)
        if reader is None:
            told: dict[str, Any] = {"content": generation.output.text}
        else:
            said = reader.feed(generation.output.texts, generation.output.end, is_cut=_is_cut(generation))
            calls = [_tool_call(call) for call in said.calls]
            content = None if calls and not said.content else said.content
            told = {"content": content, "tool_calls": calls or UNSET, **self._reasoning(said)}
        return ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", refusal=None, **told),
            logprobs=self._logprobs(generation, 0, reader),
            **_end(generation, reader),
            **self._timeline(generation),
        )

    def _more(self, generation: Generation, reader: ReplyReader | None, text: str) -> ChatMessage:
        if reader is None:
            return ChatMessage(content=text or UNSET)
        end = generation.output.end if generation.finish_reason is not None else None
        said = reader.feed(generation.output.texts[reader.num_tokens :], end, is_cut=_is_cut(generation))
        calls = [_tool_call(call, call.index) for call in said.calls]
        return ChatMessage(content=said.content or UNSET, tool_calls=calls or UNSET, **self._reasoning(said))

    def _reasoning(self, said: ReplyDelta) -> dict[str, Any]:
        if not said.reasoning or self._asked.hides_reasoning:
            return {}
        return {"reasoning_content": said.reasoning, "reasoning": said.reasoning}

    def _logprobs(
        self, generation: Generation, first: int, reader: ReplyReader | None
    ) -> ChatLogprobs | None:
        if not self._asked.with_logprobs:
            return None
        if reader is None:
            return chat_logprobs(generation, range(first, len(generation.output_ids)), self._tokenizer)
        first = self._num_scored.get(generation.index, 0)
        self._num_scored[generation.index] = len(reader.is_content)
        places = (at for at in range(first, len(reader.is_content)) if reader.is_content[at])
        return chat_logprobs(generation, places, self._tokenizer)


def _tool_call(call: CallDelta, index: int | UnsetType = UNSET) -> ToolCall:
    """A call, or a piece of it."""
    if call.name is None:
        return ToolCall(index=index, function=FunctionCall(arguments=call.arguments))
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return ToolCall(index=index, id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=function)


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


def _is_cut(generation: Generation) -> bool:
    return isinstance(generation.finish_reason, LengthReason)


def _end(generation: Generation, reader: ReplyReader | None = None) -> dict[str, Any]:
    """`finish_reason` and `matched_stop`, both null while the sequence runs."""
    reason = generation.finish_reason
    kind = None if reason is None else kind_of(reason)
    return {
        "finish_reason": reader.finish_reason if reader is not None and kind == "stop" else kind,
        "matched_stop": reason.matched if isinstance(reason, StopReason) else None,
    }
