"""What `/v1/responses` and `/v1/messages` have in common: an answer as blocks, one after the other.

    group.steps() ──▶ ReplyBlocks ──begin, more, end of a Block──▶ BlockShape ──▶ events, or one answer

A block is reasoning, content, or one call of a tool. Both dialects tell each block's beginning, its text piece by
piece, and its end; `BlockShape` writes that in their words. Their answers have one sequence.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.api.openai_requests import OpenAIRequest
from router.http.responses import StreamForm
from router.request.generation import Generation, GenerationGroup
from router.request.output_text import LengthReason
from router.text.reply_parser import ReplyDelta, ReplyReader
from router.text.served_model import ServedModel

Event = dict[str, Any]
NAMED_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or a stream of events, in the words of the dialect's own documentation.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}}},
    }
}
"""The `responses` of a route that answers in blocks."""


@dataclass
class Block:
    """One block. `text` is that of reasoning or content, or the arguments of the call of the function `name`.

    It `is_cut` where its sequence ended within it, by its limit.
    """

    index: int
    kind: Literal["reasoning", "content", "call"]
    name: str = ""
    text: str = ""
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.id = secrets.token_hex(16)


Change = tuple[Literal["begin", "more", "end"], Block, str]
"""What happens to a block, and the text that it gets with `more`."""


class ReplyBlocks:
    """Reads one sequence as blocks."""

    def __init__(self, reader: ReplyReader | None, *, hides_reasoning: bool) -> None:
        self.blocks: list[Block] = []
        self._reader = reader
        self._hides_reasoning = hides_reasoning
        self._num_read = 0
        self._is_open = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Of those so far."""
        return self._reader.num_reasoning_tokens if self._reader is not None else 0

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called."""
        return any(block.kind == "call" for block in self.blocks)

    def advance(self, generation: Generation) -> Iterator[Change]:
        """What the tokens add that have come since the last time; with the end of the sequence, that of its block."""
        texts = generation.output.texts[self._num_read :]
        self._num_read += len(texts)
        for text in texts:  # one by one, so that what they add keeps its order
            yield from self._told(self._read([text]))
        if generation.finish_reason is not None:
            is_cut = isinstance(generation.finish_reason, LengthReason)
            yield from self._told(self._read([], generation.output.end, is_cut=is_cut))
            if not self.blocks:
                yield self._begin("content")
            self.blocks[-1].is_cut = is_cut
            yield from self._end()

    def _read(self, texts: Sequence[str], end: str | None = None, *, is_cut: bool = False) -> ReplyDelta:
        if self._reader is None:
            return ReplyDelta(content="".join(texts) + (end or ""))
        return self._reader.feed(texts, end, is_cut=is_cut)

    def _told(self, said: ReplyDelta) -> Iterator[Change]:
        if said.reasoning and not self._hides_reasoning:
            yield from self._more("reasoning", said.reasoning)
        if said.content:
            yield from self._more("content", said.content)
        for call in said.calls:
            if call.name is not None:
                yield from self._end()
                yield self._begin("call", call.name)
            yield from self._more("call", call.arguments)

    def _more(self, kind: Literal["reasoning", "content", "call"], text: str) -> Iterator[Change]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._end()
            yield self._begin(kind)
        self.blocks[-1].text += text
        yield "more", self.blocks[-1], text

    def _begin(self, kind: Literal["reasoning", "content", "call"], name: str = "") -> Change:
        self.blocks.append(Block(len(self.blocks), kind, name))
        self._is_open = True
        return "begin", self.blocks[-1], ""

    def _end(self) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            yield "end", self.blocks[-1], ""


class BlockShape:
    """One dialect's words, for one answer (a `generation.Dialect`)."""

    form: StreamForm

    def __init__(self, asked: OpenAIRequest, model: ServedModel) -> None:
        self._asked = asked
        self._model = model.name
        reader = asked.reads.reader() if asked.reads is not None else None
        self._told = ReplyBlocks(reader, hides_reasoning=asked.hides_reasoning)

    async def answer(self, group: GenerationGroup) -> Event:
        """All blocks at once."""
        async with group:
            (generation,) = await group.finished()
        for _ in self._told.advance(generation):
            pass
        return self.whole(generation, self._told)

    async def events(self, group: GenerationGroup) -> AsyncGenerator[object, None]:
        """What happens to the blocks."""
        has_begun = False
        async with group:
            async for generation, _ in group.steps():
                if not has_begun:
                    has_begun = True
                    for event in self.begin(generation):
                        yield event
                for change in self._told.advance(generation):
                    for event in self.change(change):
                        yield event
            for event in self.end(group.generations[0], self._told):
                yield event

    def begin(self, generation: Generation) -> Iterable[Event]:
        """The events before any block."""
        raise NotImplementedError

    def change(self, change: Change) -> Iterable[Event]:
        """The events for what happens to a block."""
        raise NotImplementedError

    def end(self, generation: Generation, told: ReplyBlocks) -> Iterable[Event]:
        """The events behind all blocks."""
        raise NotImplementedError

    def whole(self, generation: Generation, told: ReplyBlocks) -> Event:
        """The answer of a request that asked for no stream."""
        raise NotImplementedError
