"""The output of one sequence as text. Tokens go in, and text that is safe to show comes out, until a stop ends it.

Stops are searched in the text *with* its special tokens, also where these are not shown, as in SGLang: `"stop":
"<|im_end|>"` works with skip_special_tokens. The token that completes a stop is the last output token; later tokens
of the same message are dropped. A node's own end (EOS, a stop id, the length) comes after the tokens before it, so a
stop that the last allowed token completes ends the text. A stop that only the EOS token would complete does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, Literal, cast

from msgspec import Meta

from router.dispatch.running_req import Aborted
from router.http.answer import Answer
from router.request.prompt import AnswerOptions, Prompt
from router.text.detokenizer import Detokenizer
from router.text.stops import MAX_PATTERN_SIZE, SearchBudget, StopConditions, StopCursor, expanded_size
from router.text.tokenizer import TextWorkers, Tokenizer
from shared.errors import RequestError
from shared.protocol.messages import Finish


class StopReason(Answer, kw_only=True, frozen=True, tag_field="type", tag="stop"):
    """The sequence ended at the model's own end token, or at a stop string or id of the request."""

    matched: Annotated[
        int | str | None, Meta(description="The token id or the string; null at a grammar's end.")
    ]


class LengthReason(Answer, kw_only=True, frozen=True, tag_field="type", tag="length"):
    """The sequence reached `max_new_tokens`, or the context or the KV pool is full."""

    length: Annotated[int, Meta(description="Output tokens.")]


class AbortReason(Answer, kw_only=True, frozen=True, tag_field="type", tag="abort"):
    """The sequence was ended by /abort_request."""

    message: str
    status_code: int


FinishReason = StopReason | LengthReason | AbortReason


def kind_of(reason: FinishReason) -> Literal["stop", "length", "abort"]:
    """The `type` of `reason`."""
    return cast("Literal['stop', 'length', 'abort']", reason.__struct_config__.tag)


_CHARS_A_PATTERN_CHAR = 20
"""Compiling a character of a pattern takes about as long as encoding this many characters of a text."""


@dataclass(frozen=True)
class StopScan:
    """The text that is safe to show after a piece of text, and the client's stop that was completed, if any."""

    text: str
    matched: str | None = None


async def stop_conditions(
    prompts: Sequence[AnswerOptions], workers: TextWorkers
) -> list[StopConditions | None]:
    """The stops of each prompt, if it has any. They are compiled once, by `workers` if they are long.

    Raises RequestError.
    """
    if not any(options.stop or options.stop_regex for options in prompts):
        return [None] * len(prompts)
    fields = {pattern: options.stop_regex_field for options in prompts for pattern in options.stop_regex}
    sizes = {pattern: expanded_size(pattern) for pattern in fields}
    num_chars = sum(sizes.values())
    if num_chars > MAX_PATTERN_SIZE:
        field = fields[max(sizes, key=sizes.__getitem__)]
        raise RequestError(
            f"the patterns of {field} have more than {MAX_PATTERN_SIZE} characters in all prompts together, with "
            "their repeats written out",
            param=field,
        )

    def conditions() -> list[StopConditions | None]:
        made: dict[tuple[tuple[str, ...], tuple[str, ...]], StopConditions | None] = {((), ()): None}
        budget = SearchBudget()
        for options in prompts:
            key = options.stop, options.stop_regex
            if key not in made:
                made[key] = StopConditions(*key, options.stop_regex_field, budget)
        return [made[options.stop, options.stop_regex] for options in prompts]

    num_stop_chars = sum(len(stop) for stops in {o.stop for o in prompts} for stop in stops)
    return await workers.run(_CHARS_A_PATTERN_CHAR * num_chars + num_stop_chars, conditions)


class StopMatcher:
    """Searches one text for stops and holds back a tail that may become one.

    The stop that is completed first ends the text, however the text is cut into pieces. Text that was shown is no
    part of a later stop, within the bounds of `stop_regex`. With `keep`, the stop stays in the text.
    """

    def __init__(self, conditions: StopConditions, *, keep: bool = False) -> None:
        self._cursor = StopCursor(conditions)
        self._first_chars = conditions.first_chars
        self._keep = keep
        self._held = ""
        self._visible = bytearray()  # one for each character of `_held`
        self._num_released = 0

    def feed(self, piece: str, *, visible: bool = True, armed: bool = True) -> StopScan:
        """Take the next piece of text. A matcher is not fed after a match.

        A piece that is not `visible` is searched for stops, and is never shown. A stop that is completed while not
        `armed` does not count. Raises RequestError when a pattern takes too long.
        """
        is_plain = self._first_chars is not None and self._first_chars.isdisjoint(piece)
        if not piece or (is_plain and not self._held):
            return StopScan(piece if visible else "")
        self._held += piece
        self._visible += (b"\1" if visible else b"\0") * len(piece)
        stop = self._cursor.feed(piece, armed=armed)
        if stop is not None:
            text = self._release(stop.end if self._keep else stop.start)
            self._held = ""
            return StopScan(text, stop.matched)
        return StopScan(self._release(self._num_released + len(self._held) - self._cursor.num_held))

    def flush(self) -> str:
        """The text that is held back, when no more will come."""
        return self._release(self._num_released + len(self._held))

    def _release(self, end: int) -> str:
        """The visible text up to `end` that was not released before."""
        num = max(0, end - self._num_released)
        text, self._held = self._held[:num], self._held[num:]
        visible, self._visible = self._visible[:num], self._visible[num:]
        self._num_released += num
        return text if all(visible) else "".join(compress(text, visible))


class OutputText:
    """`token_ids` so far with the text of each; `matched` is the client's stop string or pattern that ended them.

    A token has the text that it completes, so one that is half a character, or may become a stop, has none.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, conditions: StopConditions | None) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        """Of each token."""
        self.end = ""
        """The text behind that of all tokens, which the end of the sequence settles."""
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._options = prompt.options
        self._min_new_tokens = prompt.work.params.min_new_tokens
        self._detokenizer: Detokenizer = tokenizer.detokenizer(
            skip_special_tokens=self._options.skip_special_tokens, prompt_ids=prompt.work.input_ids
        )
        self._matcher = (
            StopMatcher(conditions, keep=self._options.no_stop_trim) if conditions is not None else None
        )
        self._joined = ""
        self._num_joined = 0

    @property
    def text(self) -> str:
        """All text so far. The texts are joined here, since a stream of differences does not need this."""
        if self._num_joined < len(self.texts):
            self._joined += "".join(self.texts[self._num_joined :])
            self._num_joined = len(self.texts)
        return self._joined + self.end

    def add(self, token_ids: Sequence[int], finish: Finish | Aborted | None) -> str:
        """The text that these tokens and the end of the sequence add. Raises RequestError."""
        first = len(self.texts)
        by_stop_id = _is_stop_id(token_ids, finish)
        num_shown = len(token_ids) - (by_stop_id and not self._options.no_stop_trim)
        for at, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if at >= num_shown:
                self.texts.append("")
            elif self._matcher is None:
                self.texts.append(self._detokenizer.feed(token_id))
            else:
                armed = self._armed and not (by_stop_id and at == len(token_ids) - 1)
                self.texts.append(self._scan(self._matcher, token_id, armed=armed))
                if self.matched is not None:  # a stop may end the text between two tokens
                    return "".join(self.texts[first:])
        if finish is not None:
            self.end = self._detokenizer.flush()
            if self._matcher is not None:
                scan = self._matcher.feed(self.end, armed=self._armed and not by_stop_id)
                self.matched = scan.matched
                self.end = scan.text + self._matcher.flush()
        return "".join(self.texts[first:]) + self.end

    def _scan(self, matcher: StopMatcher, token_id: int, *, armed: bool) -> str:
        before = ""
        if self._options.skip_special_tokens:
            special = self._tokenizer.vocabulary.special_text(token_id)
            scan = matcher.feed(special, visible=False, armed=armed)
            if scan.matched is not None:
                self.matched = scan.matched
                return scan.text
            before = scan.text
        scan = matcher.feed(self._detokenizer.feed(token_id), armed=armed)
        self.matched = scan.matched
        return before + scan.text

    @property
    def _armed(self) -> bool:
        """True behind the first `min_new_tokens`. A stop may begin within them, and must be completed behind them."""
        return len(self.token_ids) > self._min_new_tokens


def _is_stop_id(token_ids: Sequence[int], finish: Finish | Aborted | None) -> bool:
    """True when the node stopped at the last of these tokens."""
    return (
        isinstance(finish, Finish)
        and finish.type == "stop"
        and bool(token_ids)
        and token_ids[-1] == finish.matched
    )
