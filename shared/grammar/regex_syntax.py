"""Writes a regular expression so that XGrammar reads it as Python's `re` does, with `re.ASCII`, on the whole text.

XGrammar 0.2.8 ignores anchors that are not at an end and some lookaheads, takes unknown escapes for letters, and
reads `a{2}+` as two repetitions and `\\x41b` as one character. So the parser of `re` reads the expression, and what
it found is written in the few forms that both understand. tests/prop/test_structured_output.py compares answers with
`re` and `regex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]  # the parser of `re` has no public name
from re import _parser  # type: ignore[attr-defined]
from typing import Any

Ranges = Sequence[tuple[int, int]]
"""First and last characters."""

MAX_REPEATS = 99_999
_LAST = 0x10FFFF
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_NOT_IN_JSON: Ranges = (*_SURROGATES, (0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")))
_CATEGORIES: dict[str, Ranges] = {
    "digit": ((0x30, 0x39),),
    "space": ((0x09, 0x0D), (0x20, 0x20)),
    "word": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
_ENDS = {
    **dict.fromkeys((op.AT_BEGINNING, op.AT_BEGINNING_STRING), "is_first"),
    **dict.fromkeys((op.AT_END, op.AT_END_STRING), "is_last"),
}
_UNKNOWN = {
    op.AT: "an anchor that is not at an end",
    op.ASSERT: "a lookaround",
    op.ASSERT_NOT: "a lookaround",
    op.GROUPREF: "a backreference",
    op.SUBPATTERN: "flags",
}


def as_written_for_xgrammar(regex: str, *, in_json: bool = False) -> str:
    """Return a regular expression that XGrammar reads as `re` reads `regex`.

    `in_json` is for a `pattern`, whose text is a string of JSON: no class has a character that JSON escapes.
    Raises ValueError, which says why it cannot be enforced.
    """
    if posix := re.search(r"\[:\^?\w+:\]", regex):
        raise ValueError(f"it has {posix[0]}, which is no class here")
    try:
        parsed = _parser.parse(regex, re.ASCII)
        if parsed.state.flags != re.ASCII:
            raise ValueError("it has flags")
        return _sequence(parsed, in_json, is_first=True, is_last=True)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it has more than a few hundred levels of parentheses") from None


def _sequence(items: Iterable[Any], in_json: bool, *, is_first: bool = False, is_last: bool = False) -> str:
    """Write what stands behind each other; `is_first` and `is_last` where the whole text begins and ends there."""
    items = list(items)
    parts: list[str] = []
    for at, (code, value) in enumerate(items):
        ends = {"is_first": is_first and at == 0, "is_last": is_last and at == len(items) - 1}
        if (ranges := _ranges(code, value)) is not None:
            parts.append(_class(ranges, in_json))
        elif code is op.BRANCH:
            parts.append(f"(?:{'|'.join(_sequence(branch, in_json, **ends) for branch in value[1])})")
        elif code is op.SUBPATTERN and value[1:3] == (0, 0):
            parts.append(f"(?:{_sequence(value[3], in_json, **ends)})")
        elif code in (op.MAX_REPEAT, op.MIN_REPEAT):
            parts.append(_repeated(*value, in_json=in_json))
        elif code is not op.AT or not ends.get(_ENDS.get(value, "")):
            raise ValueError(f"it has {_UNKNOWN.get(code, str(code).lower())}")
    return "".join(parts)


def _repeated(low: int, high: int, items: Sequence[Any], *, in_json: bool) -> str:
    bound = low if high == op.MAXREPEAT else high
    if bound > MAX_REPEATS:
        raise ValueError(f"it has {bound} repetitions, more than {MAX_REPEATS}")
    text = _sequence(items, in_json)
    if len(items) != 1 or _ranges(*items[0]) is None:
        text = f"(?:{text})"
    if high == op.MAXREPEAT:
        text += "*+"[low] if low < 2 else f"{{{low},}}"
    else:
        text += f"{{{low},{high}}}"
    # In JSON, XGrammar ends behind the a of (a*b)?, and enters the repetition from behind in (ab+)? and in a|a{1,2}.
    return f"{text}(?:)" if in_json else text


def _ranges(code: Any, value: Any) -> Ranges | None:
    """The characters of an item that stands for one character; None for another item."""
    if code is op.LITERAL:
        return [(value, value)]
    if code is op.NOT_LITERAL:
        return _without([(value, value)])
    if code is op.ANY:
        return _without([(10, 10)])
    if code is op.RANGE:
        return [value]
    if code is op.CATEGORY:
        name = str(value).lower().removeprefix("category_")
        ranges = _CATEGORIES[name.removeprefix("not_")]
        return _without(ranges) if name.startswith("not_") else ranges
    if code is not op.IN:
        return None
    is_negative = value[0][0] is op.NEGATE
    members = [each for item in value[is_negative:] for each in _ranges(*item) or ()]
    return _without(members) if is_negative else members


def _without(ranges: Ranges) -> Ranges:
    """All characters but these."""
    others, start = list[tuple[int, int]](), 0
    for low, high in sorted(ranges):
        if start < low:
            others.append((start, low - 1))
        start = max(start, high + 1)
    return [*others, (start, _LAST)] if start <= _LAST else others


def _class(ranges: Ranges, in_json: bool) -> str:
    ranges = _without([*_without(ranges), *(_NOT_IN_JSON if in_json else _SURROGATES)])
    if not ranges:
        raise ValueError("it has a class without a character that may be written")
    first, last = ranges[0][0], ranges[-1][1]
    if first == last:
        return _char(first)
    # XGrammar takes an escaped ^ at the beginning for its opposite.
    begins = _char(last) if first == ord("^") else ""
    return f"[{begins}{''.join(f'{_char(low)}-{_char(high)}' for low, high in ranges)}]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"
