"""Finds where stop strings and patterns end a text, and holds back a tail that may become a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from router.http.wording import shown
from router.request.prompt import AnswerOptions
from router.text.stop_regex import MAX_PATTERN_SIZE, StopPatternCursor, StopPatterns, expanded_size
from router.text.stop_strings import StopStringCursor, StopStrings
from router.text.text_workers import TextWorkers
from shared.errors import RequestError

_CHARS_A_PATTERN_CHAR = 20
"""Compiling a character of a pattern takes about as long as encoding this many characters of a text."""


@dataclass(frozen=True)
class StopScan:
    """The text that is safe to show after a piece of text, and the client's stop that was completed, if any."""

    text: str
    matched: str | None = None


class StopConditions:
    """The stops of one prompt, with compiled patterns. Raises RequestError."""

    def __init__(
        self, strings: Sequence[str], patterns: Sequence[str] = (), patterns_field: str = "stop_regex"
    ) -> None:
        self.strings = StopStrings(strings) if strings else None
        self.patterns = StopPatterns(patterns, patterns_field) if patterns else None

    def __bool__(self) -> bool:
        return self.strings is not None or self.patterns is not None


async def stop_conditions(prompts: Sequence[AnswerOptions], workers: TextWorkers) -> list[StopConditions]:
    """The stops of each prompt. A pattern is compiled once, by `workers` if it is long. Raises RequestError."""
    fields = {pattern: options.stop_regex_field for options in prompts for pattern in options.stop_regex}
    sizes = {pattern: _size(pattern, field) for pattern, field in fields.items()}
    num_chars = sum(sizes.values())
    if num_chars > MAX_PATTERN_SIZE:
        field = fields[max(sizes, key=sizes.__getitem__)]
        raise RequestError(
            f"the patterns of {field} have more than {MAX_PATTERN_SIZE} characters in all prompts together, with "
            "their repeats written out",
            param=field,
        )

    def conditions() -> list[StopConditions]:
        made: dict[tuple[tuple[str, ...], tuple[str, ...]], StopConditions] = {}
        for options in prompts:
            key = options.stop, options.stop_regex
            if key not in made:
                made[key] = StopConditions(*key, options.stop_regex_field)
        return [made[options.stop, options.stop_regex] for options in prompts]

    return await workers.run(_CHARS_A_PATTERN_CHAR * num_chars, conditions)


def _size(pattern: str, field: str) -> int:
    size = expanded_size(pattern)
    if size is None:
        raise RequestError(
            f"{field} {shown(pattern)} has a comment, flags in the middle, the flag x or an extension that Python's "
            "re does not know, so that its size cannot be told",
            param=field,
        )
    return size


class StopMatcher:
    """Searches one text for stops and holds back a tail that may become one.

    The stop that is completed first ends the text, however the text is cut into pieces. Text that was shown is no
    part of a later stop, within the bounds of `stop_regex`. With `keep`, the stop stays in the text.
    """

    def __init__(self, conditions: StopConditions, *, keep: bool = False) -> None:
        self._cursors: list[StopStringCursor | StopPatternCursor] = []
        if conditions.strings is not None:
            self._cursors.append(StopStringCursor(conditions.strings))
        if conditions.patterns is not None:
            self._cursors.append(StopPatternCursor(conditions.patterns))
        self._keep = keep
        self._held = ""
        self._visible = bytearray()  # one for each character of `_held`
        self._num_released = 0

    def feed(self, piece: str, *, visible: bool = True, armed: bool = True) -> StopScan:
        """Take the next piece of text. A matcher is not fed after a match.

        A piece that is not `visible` is searched for stops, and is never shown. A stop that is completed while not
        `armed` does not count. Raises RequestError when a pattern takes too long.
        """
        if not piece:
            return StopScan("")
        self._held += piece
        self._visible += (b"\1" if visible else b"\0") * len(piece)
        found = [stop for cursor in self._cursors if (stop := cursor.feed(piece, armed=armed))]
        if found:
            stop = min(found)
            text = self._release(stop.end if self._keep else stop.start)
            self._held = ""
            return StopScan(text, stop.matched)
        num_held = max((cursor.num_held for cursor in self._cursors), default=0)
        return StopScan(self._release(self._num_released + len(self._held) - num_held))

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
