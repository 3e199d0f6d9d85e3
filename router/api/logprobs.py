"""The logprobs of an answer, in the fields of each API."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from router.api.openai_answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from router.request.generation import Generation
from router.text.tokenizer import TextWorkers, Tokenizer
from shared.protocol.logprobs import LogprobParams, TokenLogprobs

CHARS_A_LOGPROB = 2
"""Writing a number about a token of an echoed prompt costs as much as encoding so many characters."""

TextOf = Callable[[int], str]
Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text), as in SGLang. The first token of a prompt has no logprob."""


class NativeLogprobs:
    """The logprob fields of `meta_info`, for a sequence that grows; with the tokens' texts if there is a `text_of`.

    A stream repeats all of them in every event, so they are made once. The prompt's may be megabytes, so they are
    kept as JSON.
    """

    def __init__(self, generation: Generation, workers: TextWorkers, text_of: TextOf | None) -> None:
        self._generation = generation
        self._workers = workers
        self._text_of = text_of
        self._of_input: dict[str, msgspec.Raw] | None = None
        self._num_outputs = 0
        self._of_output: dict[str, list[object]] = {}

    async def so_far(self) -> dict[str, Any]:
        """Fields of MetaInfo. Their lists grow, so they are encoded before the next call."""
        wanted = self._generation.prompt.work.params.logprobs
        if wanted is None:
            return {}
        of_input = self._of_input
        if of_input is None:
            all_there = wanted.start_len < 0 or self._generation.req.input_logprobs is not None
            num_chars = CHARS_A_LOGPROB * self._generation.prompt.num_input_logprobs
            of_input = await self._workers.run(num_chars, lambda: self._input(wanted))
            if all_there:
                self._of_input = of_input
        return {**of_input, **self._output()}

    def _input(self, wanted: LogprobParams) -> dict[str, msgspec.Raw]:
        generation, logprobs, token_ids = self._generation, list[TokenLogprobs | None](), tuple[int, ...]()
        if wanted.start_len >= 0:
            logprobs = [None, *generation.input_logprobs]  # the first token of a prompt has none
            token_ids = generation.prompt.work.input_ids[wanted.start_len :][: len(logprobs)]
        fields = self._fields("input", token_ids, logprobs)
        return {name: msgspec.Raw(msgspec.json.encode(rows)) for name, rows in fields.items()}

    def _output(self) -> dict[str, list[object]]:
        first, generation = self._num_outputs, self._generation
        fields = self._fields("output", generation.output_ids[first:], generation.output_logprobs[first:])
        for name, rows in fields.items():
            self._of_output.setdefault(name, []).extend(rows)
        self._num_outputs = len(generation.output_ids)
        return self._of_output

    def _fields(
        self, side: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Sequence[object]]:
        """The fields of the tokens of a side, "input" or "output"."""
        wanted, text_of = self._generation.prompt.work.params.logprobs, self._text_of
        assert wanted is not None

        def entry(logprob: float | None, token_id: int) -> Entry:
            return logprob, token_id, text_of(token_id) if text_of is not None else None

        scored = zip(token_ids, logprobs, strict=True)
        fields: dict[str, Sequence[object]] = {
            f"{side}_token_logprobs": [entry(known.logprob if known else None, i) for i, known in scored]
        }
        if wanted.top_num:
            tops = ([entry(*top) for top in known.top] if known else None for known in logprobs)
            fields[f"{side}_top_logprobs"] = list(tops)
        if wanted.token_ids:
            rows = (
                zip(known.of_token_ids, wanted.token_ids, strict=True) if known else None
                for known in logprobs
            )
            fields[f"{side}_token_ids_logprobs"] = [row and [entry(*one) for one in row] for row in rows]
        return fields


def chat_logprobs(generation: Generation, places: Iterable[int], tokenizer: Tokenizer) -> ChatLogprobs:
    """The `choices[].logprobs` of a chat, for the output tokens at these places."""

    def likely(logprob: float, token_id: int) -> TopLogprob:
        text, raw = tokenizer.token_text(token_id), tokenizer.vocabulary.token_bytes(token_id)
        return TopLogprob(token=text, logprob=logprob, bytes=list(raw))

    scored = ((generation.output_ids[at], generation.output_logprobs[at]) for at in places)
    content = [
        TokenLogprob(
            token=tokenizer.token_text(token_id),
            logprob=known.logprob,
            bytes=list(tokenizer.vocabulary.token_bytes(token_id)),
            top_logprobs=[likely(*top) for top in known.top],
        )
        for token_id, known in scored
    ]
    return ChatLogprobs(content=content)


class ScoredText:
    """The tokens of a completion with their logprobs and their offsets in its text, which begins with an `echo`."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, echo: str | None) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._echo = echo
        self._offsets: list[int] = []
        """Of the output tokens so far, and where the next begins."""
        self._end = len(echo or "")

    def logprobs(self, *, prompt: bool, output_from: int | None) -> CompletionLogprobs:
        """The `choices[].logprobs` of the prompt, and of output tokens from `output_from` on (None: of none)."""
        generation = self._generation
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        if prompt and self._echo is not None:
            logprobs += (None, *generation.input_logprobs)
            token_ids += generation.prompt.work.input_ids[: len(logprobs)]
            skip = generation.prompt.options.skip_special_tokens
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip)
            lengths = [len(detokenizer.feed(token_id)) for token_id in token_ids]
            offsets += itertools.accumulate(lengths[:-1], initial=0)
        if output_from is not None:
            token_ids += generation.output_ids[output_from:]
            logprobs += generation.output_logprobs[output_from:]
            for text in generation.output.texts[len(self._offsets) :]:
                self._offsets.append(self._end)
                self._end += len(text)
            offsets += self._offsets[output_from:]
        scored = list(zip(token_ids, logprobs, strict=True))
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_name(token_id) for token_id in token_ids],
            token_logprobs=[known.logprob if known else None for known in logprobs],
            top_logprobs=[self._likeliest(token_id, known) if known else None for token_id, known in scored],
            text_offset=offsets,
        )

    def _likeliest(self, token_id: int, known: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself, as OpenAI has them. Names that are taken become `token_id:N`."""
        found: dict[str, float] = {}
        own = self._tokenizer.token_name(token_id)
        for other, logprob in {i: p for p, i in (*known.top, (known.logprob, token_id))}.items():
            name = own if other == token_id else self._tokenizer.token_name(other)
            is_taken = name in found or (name == own and other != token_id)
            found[f"token_id:{other}" if is_taken else name] = logprob
        return found
