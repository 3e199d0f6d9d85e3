"""Finds strings and patterns that end a text which arrives in pieces, within bounds on time and memory.

A pattern is searched in the text so far after every token, as in SGLang, so `$`, `\\b` and a lookahead take the end
of the text so far as the end. The library `regex` has the syntax of Python's `re`, and finds where a match may have
begun that is not complete. The hold-back is therefore exact within these bounds:

    A match has at most MAX_MATCH_CHARS. A longer one is found only if its end matches by itself.
    At most MAX_HELD_CHARS are held back. The part of a longer match that was shown stays shown.
    A match of no characters (`\\b`) counts behind the first character, since an empty text helps no client.
    A lookbehind sees CONTEXT_CHARS before the first place where a match may begin.
    Searching may take BASE_BUDGET_S, and BUDGET_S for each token. A request that needs more fails.
    Compiling writes counted repeats out, so `expanded_size` is bounded before a pattern is compiled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import regex

from router.http.wording import shown
from shared.errors import RequestError
from shared.timeline import Clock


@dataclass(frozen=True, order=True)
class Stop:
    """A stop in the text: where it ends and begins, and the client's string or pattern.

    The smallest of several stops counts: the one that ends first, and of two with the same end the one that begins
    first. So the result does not depend on how the text was cut into pieces.
    """

    end: int
    start: int
    matched: str


class StopStrings:
    """The stops of one request, each with its borders, by which it is searched in one pass (Knuth, Morris, Pratt)."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self.with_borders = [(stop, _borders(stop)) for stop in dict.fromkeys(stops)]
        self.first_chars = frozenset(stop[0] for stop in stops)


def _borders(stop: str) -> list[int]:
    """Of each beginning of `stop`, by its length, how much of its end is a shorter beginning."""
    borders = [0, 0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length]
        borders.append(length + (stop[length] == char))
    return borders


class StopStringCursor:
    """One text that is searched for StopStrings."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._lengths = [0] * len(stops.with_borders)
        """Of each stop, how much of its beginning the text ends with."""
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may become part of a stop."""
        return max(self._lengths)

    def feed(self, piece: str, *, armed: bool = True) -> Stop | None:
        """The first stop that `piece` completes; None if not `armed`. A cursor is not fed after a stop."""
        start, self._num_chars = self._num_chars, self._num_chars + len(piece)
        if not any(self._lengths) and self._stops.first_chars.isdisjoint(piece):
            return None
        for end, char in enumerate(piece, start + 1):
            completed = list(filter(None, map(self._step, range(len(self._lengths)), repeat(char))))
            if completed and armed:
                longest = max(completed, key=len)
                return Stop(end, end - len(longest), longest)
        return None

    def _step(self, at: int, char: str) -> str | None:
        """Take one more character for one of the stops; returns the stop if that completes it."""
        stop, borders = self._stops.with_borders[at]
        length = self._lengths[at]
        while length and stop[length] != char:
            length = borders[length]
        length += stop[length] == char
        is_whole = length == len(stop)
        self._lengths[at] = borders[length] if is_whole else length
        return stop if is_whole else None


MAX_MATCH_CHARS = 32_768
MAX_HELD_CHARS = 1024
CONTEXT_CHARS = 256
MAX_PATTERN_SIZE = 16_384
"""The largest sum of `expanded_size` over the patterns of an HTTP request. It compiles in up to 50 ms (2 cores)."""
BASE_BUDGET_S = 0.05
BUDGET_S = 5e-4
_SEARCH_TIMEOUT_S = 0.02
"""The timeout of one search. The library reads the clock every so many steps, so a search may take twice as long."""
_PARTS = re.compile(
    r"""(?P<flags>\A\(\?[aiLmsu]+\))
      | (?P<open>\((?:\?(?:[:=!>]|<[=!]|P?<\w+>|\(\w+\)|[aiLmsu]*(?:-[ims]+)?:))?(?![?*]))
      | (?P<close>\))
      | (?P<repeat>[*+?]|\{(?P<least>\d*)(?P<range>,\d*)?\})[?+]?
      | (?P<unknown>\(\?(?!P=\w+\))|\(\*|\{[\ddeis]|\[\^?\]?(?:\\.|[^\]\\])*?\[:)
      | (?P<atom>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P=\w+\)|.)
    """,
    re.DOTALL | re.VERBOSE,
)
"""The parts of a pattern in the syntax of `re`. Everything else that the library knows is `unknown`: comments and
flags in the middle (a repeat behind them repeats the part before them), verbose patterns, calls, verbs,
fuzziness, `[:alpha:]` in a class."""


class StopPatterns:
    """Compiled patterns of one request."""

    def __init__(self, patterns: Sequence[str], field: str = "stop_regex") -> None:
        """`field` names them in errors. Raises RequestError. The caller has bounded their `expanded_size`."""
        self.field = field
        names = [field] if len(patterns) == 1 else [f"{field}[{at}]" for at in range(len(patterns))]
        self.compiled = [_compile(*each) for each in zip(patterns, names, strict=True)]


class StopPatternCursor:
    """One text that is searched for StopPatterns."""

    def __init__(self, patterns: StopPatterns, cpu_clock: Clock = time.thread_time) -> None:
        self._cpu_clock = cpu_clock
        self._patterns = patterns.compiled
        self._field = patterns.field
        self._text = ""  # the end of the text, from `_start` on
        self._start = 0
        self._from = [0] * len(self._patterns)  # for each pattern, where in `_text` a match may begin
        self._left_s = BASE_BUDGET_S
        self._until = 0.0
        """When the CPU time of this call of `feed` is used up."""

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may become part of a match, at most MAX_HELD_CHARS."""
        return min(len(self._text) - min(self._from), MAX_HELD_CHARS)

    def feed(self, piece: str, *, armed: bool = True) -> Stop | None:
        """The match that `piece` completes and that ends first; None if not `armed`. Raises RequestError.

        A match that is completed while not `armed` does not count, and later matches begin after its first character.
        """
        num_old, self._text = len(self._text), self._text + piece
        self._until = self._cpu_clock() + self._left_s + BUDGET_S
        try:
            found = [stop for at in range(len(self._patterns)) if (stop := self._find(at, num_old, armed))]
        except TimeoutError:
            found, self._until = [], -1.0
        self._left_s = self._until - self._cpu_clock()
        if self._left_s < 0:
            raise RequestError(
                f"{self._field} takes too long on this output: more than {BASE_BUDGET_S:g} s and "
                f"{1e3 * BUDGET_S:g} ms for each token",
                param=self._field,
            )
        self._forget()
        return min(found, default=None)

    def _find(self, at: int, num_old: int, armed: bool) -> Stop | None:
        pattern = self._patterns[at]
        while self._from[at] <= len(self._text) and (found := self._search(pattern, self._from[at])):
            if armed:
                return self._completed(pattern, self._from[at], num_old)
            self._from[at] = found.start() + 1
        possible = self._search(pattern, self._from[at], partial=True)
        self._from[at] = max(self._from[at], possible.start() if possible else len(self._text))
        return None

    def _completed(self, pattern: regex.Pattern[str], start: int, num_old: int) -> Stop | None:
        """The match that would be found first if the new text came one character at a time."""
        for end in range(max(num_old, start) + 1, len(self._text) + 1):
            if found := self._search(pattern, start, end):
                return Stop(self._start + end, self._start + found.start(), pattern.pattern)
        return None

    def _search(
        self, pattern: regex.Pattern[str], start: int, end: int | None = None, *, partial: bool = False
    ) -> regex.Match[str] | None:
        if self._cpu_clock() > self._until:
            raise TimeoutError  # one call of `feed` may need many searches, each within the timeout
        found = pattern.search(
            self._text, start, end, partial=partial, timeout=_SEARCH_TIMEOUT_S, concurrent=False
        )
        if found and self._text and self._start + found.end() == 0:
            return self._search(pattern, 1, end, partial=partial)
        return found

    def _forget(self) -> None:
        """Drop text in which no match can begin. CONTEXT_CHARS are kept, so ^ matches only at the text's start."""
        least = len(self._text) - MAX_MATCH_CHARS
        self._from = [max(start, least) for start in self._from]
        num_dropped = min(self._from) - CONTEXT_CHARS
        if num_dropped > CONTEXT_CHARS:
            self._text = self._text[num_dropped:]
            self._start += num_dropped
            self._from = [start - num_dropped for start in self._from]


def expanded_size(pattern: str) -> int | None:
    """Characters of `pattern` with its counted repeats written out; None if it has an `unknown` part.

    The library compiles `x{m}` as m copies of x, `x{m,n}` as m copies and a loop over one more, and `x+` as
    `x{1,}`, so nested repeats multiply. The count ends one above MAX_PATTERN_SIZE.
    """
    totals, last = [0], 0  # the size of each open group, and of the last item, which a repeat would repeat
    for part in _PARTS.finditer(pattern):
        match part.lastgroup:
            case "unknown":
                return None
            case "open":
                totals.append(len(part[0]))
                last = 1
            case "close" if len(totals) > 1:
                last = totals.pop() + len(")")
                totals[-1] += last
            case "repeat":
                last *= _num_copies(part) - 1
                totals[-1] += last + len(part[0])
            case _:
                last = 1
                totals[-1] += len(part[0])
        totals[-1] = min(totals[-1], MAX_PATTERN_SIZE + 1)
        last = min(last, MAX_PATTERN_SIZE + 1)
    return min(sum(totals), MAX_PATTERN_SIZE + 1)


def _num_copies(repeat: re.Match[str]) -> int:
    kind = repeat["repeat"]
    if kind in "*?":
        return 1
    least = 1 if kind == "+" else int(repeat["least"].lstrip("0")[:6] or 0)
    is_exact = kind != "+" and repeat["range"] is None
    return max(least, 1) if is_exact or not least else least + 1


def _compile(pattern: str, name: str) -> regex.Pattern[str]:
    try:
        compiled = regex.compile(pattern, cache_pattern=False)
        matches_nothing = compiled.search("", timeout=_SEARCH_TIMEOUT_S)
    except (regex.error, RecursionError, OverflowError, MemoryError, TimeoutError) as e:
        raise RequestError(
            f"{name} {shown(pattern)} is not a pattern that can be used: {e}", param=name
        ) from e
    if compiled.flags & regex.REVERSE:
        raise RequestError(f"{name} {shown(pattern)} searches backwards, which no stream can", param=name)
    if matches_nothing:
        raise RequestError(
            f"{name} {shown(pattern)} matches the empty text, so that nothing could be generated", param=name
        )
    return compiled
