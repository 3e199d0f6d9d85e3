"""Finds strings and patterns that end a text which arrives in pieces, within bounds on time and memory.

A string is a pattern without special characters. A pattern is searched in the text so far after every token, as in
SGLang, so `$`, `\\b` and a lookahead take the end of the text so far as the end. The library `regex` has the syntax
of Python's `re`, and finds where a match may have begun that is not complete. The hold-back is therefore exact within
these bounds:

    A match has at most MAX_MATCH_CHARS. A longer one is found only if its end matches by itself.
    At most MAX_HELD_CHARS are held back. The part of a longer match that was shown stays shown.
    A match of no characters (`\\b`) counts behind the first character, since an empty text helps no client.
    A lookbehind sees CONTEXT_CHARS before the first place where a match may begin.
    Searching may take BASE_BUDGET_S for a request, and BUDGET_S for each token. A request that needs more fails.
    Compiling writes counted repeats out, so `expanded_size` is bounded before a pattern is compiled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

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


MAX_MATCH_CHARS = 32_768
MAX_HELD_CHARS = 1024
CONTEXT_CHARS = 256
MAX_PATTERN_SIZE = 16_384
"""The largest sum of `expanded_size` over the patterns of an HTTP request. It compiles in up to 50 ms (2 cores)."""
BASE_BUDGET_S = 0.05
BUDGET_S = 5e-4
_SEARCH_TIMEOUT_S = 0.02
"""The timeout of one search. The library reads the clock every so many steps, so a search may take twice as long."""
_MAX_TABLE_CHARS = 128
_NEVER = "(?!)|"
"""Before a longer string. For a literal that must occur, the library makes a table, once and without a look at its
timeout, in a time that grows with the cube of its length (1024 times `a`: 0.3 s). With an alternative none must."""
_REPEATS = re.compile(r"(?P<of_group>[)}])?(?:\+|\{(?P<least>\d*))")
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


class SearchBudget:
    """CPU seconds that are left for the searches of all sequences of a request."""

    def __init__(self) -> None:
        self.left_s = BASE_BUDGET_S


class StopConditions:
    """The stops of one prompt, compiled: one at least."""

    def __init__(
        self,
        strings: Sequence[str],
        patterns: Sequence[str] = (),
        field: str = "stop_regex",
        budget: SearchBudget | None = None,
    ) -> None:
        """`field` names the patterns in errors; without a `budget` they have one of their own.

        Raises RequestError. The caller has bounded the patterns' `expanded_size`.
        """
        regex.purge()  # the library keeps a note of each pattern, also of one that it does not cache
        self.budget = budget or SearchBudget()
        assert all(strings), "an empty stop string would match everywhere"
        self.field = field if patterns else "stop"
        names = [field] if len(patterns) == 1 else [f"{field}[{at}]" for at in range(len(patterns))]
        self.compiled = [_compile(*each) for each in zip(patterns, names, strict=True)]
        self.compiled += [_literal(string) for string in strings]
        self.matched = [*patterns, *strings]
        """The client's string or pattern of each."""
        self.first_chars = None if patterns else frozenset(string[0] for string in strings)
        """With which a stop begins; None where it may begin with any."""


class StopCursor:
    """One text that is searched for stops."""

    def __init__(self, conditions: StopConditions, cpu_clock: Clock = time.thread_time) -> None:
        self._cpu_clock = cpu_clock
        self._patterns = conditions.compiled
        self._matched = conditions.matched
        self._field = conditions.field
        self._text = ""  # the end of the text, from `_start` on
        self._start = 0
        self._from = [0] * len(self._patterns)  # for each pattern, where in `_text` a match may begin
        self._budget = conditions.budget
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
        self._until = self._cpu_clock() + self._budget.left_s + BUDGET_S
        try:
            found = [stop for at in range(len(self._patterns)) if (stop := self._find(at, num_old, armed))]
        except TimeoutError:
            found, self._until = [], -1.0
        self._budget.left_s = self._until - self._cpu_clock()
        if self._budget.left_s < 0:
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
                return self._completed(at, num_old)
            self._from[at] = found.start() + 1
        possible = self._search(pattern, self._from[at], partial=True)
        self._from[at] = max(self._from[at], possible.start() if possible else len(self._text))
        return None

    def _completed(self, at: int, num_old: int) -> Stop | None:
        """The match that would be found first if the new text came one character at a time."""
        start = self._from[at]
        for end in range(max(num_old, start) + 1, len(self._text) + 1):
            if found := self._search(self._patterns[at], start, end):
                return Stop(self._start + end, self._start + found.start(), self._matched[at])
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


def expanded_size(pattern: str) -> int:
    """At least the characters of `pattern` with its counted repeats written out.

    The library compiles `x{m}` as m copies of x, `x{m,n}` as m copies and a loop over one more, and `x+` as
    `x{1,}`. Repeats of groups may be nested, so they are taken to be; with the flag x, all repeats are.
    """
    size, copies, is_verbose = len(pattern), 1, _VERBOSE.search(pattern) is not None
    for found in _REPEATS.finditer(pattern):
        times = 2 if found["least"] is None else 1 + int(found["least"].lstrip("0")[:6] or 0)
        size += times
        copies *= times if found["of_group"] or is_verbose else 1
    return size * copies


def _literal(string: str) -> regex.Pattern[str]:
    before = _NEVER if len(string) > _MAX_TABLE_CHARS else ""
    return regex.compile(before + regex.escape(string), cache_pattern=False)


def _compile(pattern: str, name: str) -> regex.Pattern[str]:
    try:
        compiled = regex.compile(pattern, cache_pattern=False)
        matches_nothing = compiled.search("", timeout=_SEARCH_TIMEOUT_S)
    except (
        regex.error,
        ValueError,
        TypeError,
        RecursionError,
        OverflowError,
        MemoryError,
        TimeoutError,
    ) as e:
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
