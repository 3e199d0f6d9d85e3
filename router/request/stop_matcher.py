"""Where the text of a sequence ends: stop strings and patterns, and what is held back until that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from router.request.sampling import Sampling
from router.text.stop_regex import StopPatternCursor, StopPatterns
from router.text.stop_strings import StopStringCursor, StopStrings
from router.text.text_workers import TextWorkers
from shared.errors import RequestError

MAX_PATTERN_CHARS = 16_384
"""Of one HTTP request, however many prompts it has."""
_CHARS_A_PATTERN_CHAR = 20
"""Compiling a character of a pattern takes as long as encoding so many of a text."""


@dataclass(frozen=True)
class StopScan:
    """What one piece of text led to: text that is safe to show, and the stop that was completed, as it was given."""

    text: str
    matched: str | None = None


class StopConditions:
    """What ends the texts of one prompt. Compiling patterns takes a while. Raises RequestError."""

    def __init__(
        self, strings: Sequence[str], patterns: Sequence[str] = (), patterns_field: str = "stop_regex"
    ) -> None:
        self.strings = StopStrings(strings) if strings else None
        self.patterns = StopPatterns(patterns, patterns_field) if patterns else None

    def __bool__(self) -> bool:
        return self.strings is not None or self.patterns is not None


async def stop_conditions(samplings: Sequence[Sampling], workers: TextWorkers) -> list[StopConditions]:
    """Of each prompt of a request. Patterns are compiled once, off the event loop. Raises RequestError."""
    patterns = {sampling.stop_regex for sampling in samplings}
    num_chars = sum(len(pattern) for several in patterns for pattern in several)
    if num_chars > MAX_PATTERN_CHARS:
        raise RequestError(
            f"the patterns of stop_regex have {num_chars} characters in all prompts together; "
            f"at most {MAX_PATTERN_CHARS}",
            param="stop_regex",
        )

    def conditions() -> list[StopConditions]:
        made: dict[tuple[tuple[str, ...], tuple[str, ...]], StopConditions] = {}
        for sampling in samplings:
            key = sampling.stop, sampling.stop_regex
            if key not in made:
                made[key] = StopConditions(*key, sampling.stop_regex_field)
        return [made[sampling.stop, sampling.stop_regex] for sampling in samplings]

    return await workers.run(_CHARS_A_PATTERN_CHAR * num_chars, conditions)


class StopMatcher:
    """Holds back a tail that may still become a stop.

    The stop that is completed first wins, whatever pieces the text comes in. What was shown is no part of a later
    one, since every possible beginning is held back (as far as `stop_regex` allows). `keep` leaves the stop in the
    text.
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
        """Take the next piece of text. Not to be called after a match.

        What is not `visible` belongs to the text that stops are looked for in, but is never shown. A stop that is
        completed while not `armed` does not count. Raises RequestError when a pattern takes too long.
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
        """The text that was held back, when no more will come."""
        return self._release(self._num_released + len(self._held))

    def _release(self, end: int) -> str:
        """What is visible of the text up to `end`, beyond what was released before."""
        num = max(0, end - self._num_released)
        text, self._held = self._held[:num], self._held[num:]
        visible, self._visible = self._visible[:num], self._visible[num:]
        self._num_released += num
        return text if all(visible) else "".join(compress(text, visible))
