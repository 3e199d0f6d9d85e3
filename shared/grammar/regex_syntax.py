"""Which regular expressions XGrammar follows as Python's `re` reads them, with `re.ASCII`, on the whole text.

XGrammar 0.2.8 ignores anchors that are not at an end and some lookaheads. It takes unknown escapes for letters, reads
`a{2}+` as two repetitions and `\\x41b` as one character, and a class that begins with an escaped ^ as its opposite.
So only the syntax below is let in. tests/prop/test_structured_output.py compares answers with `re` and `regex`.
"""

from __future__ import annotations

import re
from typing import Literal

from shared.errors import RequestError

_ESCAPE = r"""\\(?: [dDwWsS](?!-[^\]]) | [fnrtv!-/:-@\[-`{-~ ] | 0(?![0-9])
                 | (?: x | u00 ) (?!2[dD]) [0-9A-Fa-f]{2} | u(?!00|[dD][89A-Fa-f])[0-9A-Fa-f]{4} )"""
_PART = re.compile(
    rf"""
      (?P<class> \[ \^?+ (?! \] | \\(?:\^|x5[eE]|u005[eE]) )
          (?: (?: [^\\\]\[] | \[(?!:) | \\b | {_ESCAPE} ) (?!-\\[dDwWsS]) )++ \] )
    | (?P<atom> [^\\^$|?*+()\[{{] | {_ESCAPE} )
    | (?P<repeat> (?: [?*+] | \{{ [0-9]{{1,5}} (?: ,[0-9]{{0,5}} )? \}} ) \?? )
    | (?P<open> \( (?: \?: | \?P?<[A-Za-z_][A-Za-z0-9_]*> | (?!\?) ) )
    | (?P<close> \) ) | (?P<bar> \| ) | (?P<begin> \^ ) | (?P<end> \$ )
    """,
    re.VERBOSE,
)
_WRITTEN = {".": r"[^\n]", r"\s": r"[ \t-\r]"}
_WRITTEN_IN_CLASS = {r"\s": r" \t-\r", r"\S": r"\u0000-\u0008\u000e-\u001f!-\u{10ffff}"}
_IN_CLASS = re.compile(r"\\x..|\\u00..|\\.", re.DOTALL)
_IN_CLASS_OF_JSON = re.compile(r"\\x..|\\u....|\\.|-(?=\]\Z)|[^ -~]", re.DOTALL)


def _class_of_json(text: str) -> str:
    """A class without the characters that JSON escapes.

    XGrammar keeps them out only if all of the regular expression is ASCII, and something else is left.
    """
    text = _IN_CLASS_OF_JSON.sub(lambda member: _member_of_json(member[0]), text)
    return rf"""{text[:-1]}"\\\u{{0}}-\u{{1f}}]""" if text.startswith("[^") else text


def _member_of_json(member: str) -> str:
    if member == "-":  # the last one, which would become a range
        return r"\-"
    code = ord(member) if len(member) == 1 else int(member[2:], 16) if len(member) > 2 else None
    return _WRITTEN_IN_CLASS.get(member, member) if code is None else f"\\u{{{code:x}}}"


def _escape_in_class(escape: str) -> str:
    """XGrammar takes a hex digit behind some escapes for a part of them, so these are written as the character."""
    code = int(escape[-2:], 16) if len(escape) > 2 else 0
    if 0 < code < 0x20 or code >= 0x7F:
        return chr(code)
    return _WRITTEN_IN_CLASS.get(escape, escape.replace(r"\x", r"\u00"))


def as_written_for_xgrammar(regex: str, *, in_json: bool) -> str:
    """Return a regular expression that XGrammar reads as `re` reads `regex`.

    `in_json` is for a `pattern`, whose text is a string of JSON: no class has a character that JSON escapes.
    Raises ValueError for syntax whose meaning XGrammar would change. Errors of syntax that it tells are left to it.
    """
    parts: list[str] = []
    at = depth = 0
    before = "bar"
    while at < len(regex):
        part = _PART.match(regex, at)
        kind = str(part.lastgroup) if part else ""
        wrong = {
            "": True,
            "repeat": before not in ("atom", "class", "close"),
            "begin": depth > 0 or before != "bar",
            "end": depth > 0,
        }
        if before == "end" and kind != "bar":
            raise ValueError(f"{regex[at - 1 : at + 9]!r} at character {at - 1}")
        if part is None or wrong.get(kind):
            raise ValueError(f"{regex[at : at + 10]!r} at character {at}")
        text = part[0]
        if kind == "class" and in_json:
            text = _class_of_json(text)
        elif kind == "class":
            text = _IN_CLASS.sub(lambda escape: _escape_in_class(escape[0]), text)
        if kind == "atom":
            is_literal = in_json and len(text) == 1 and text > "~"
            text = _member_of_json(text) if is_literal else text.replace(r"\x", r"\u00")
        if kind == "repeat" and in_json:
            # XGrammar ends behind the a of (a*b)?, and enters the repetition from behind in (ab+)? and in a|a{1,2}.
            text = re.sub(r"^\?", "{0,1}", text) + "(?:)"
        parts.append("(?:" if kind == "open" else _WRITTEN.get(text, text))
        depth += {"open": 1, "close": -1}.get(kind, 0)
        at, before = part.end(), kind
    return "".join(parts)


def regex_for_xgrammar(regex: str, kind: Literal["regex", "ebnf"]) -> str:
    """The same, for a request whose grammar is of this kind. Raises RequestError."""
    try:
        return as_written_for_xgrammar(regex, in_json=False)
    except ValueError as found:
        raise RequestError(
            f"{kind}: a regular expression with {found} cannot be enforced", param=kind
        ) from None
