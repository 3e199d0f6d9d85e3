"""Limits the nesting of a grammar's text. XGrammar recurses once for each level and has no limit of its own.

The regular expressions of EBNF are checked here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable

from shared.errors import RequestError
from shared.grammar.regex_syntax import regex_for_xgrammar
from shared.protocol.sampling_params import Grammar

MAX_SCHEMA_DEPTH = 256
"""Levels of nesting in a schema. XGrammar's time and memory grow with their cube: 400 objects take 11 s."""
MAX_REGEX_DEPTH = 256
"""Levels of parentheses in a regular expression, also in a `pattern`, in `patternProperties` or in Regex()."""

Pairs = list[tuple[str, object]]

_REGEX_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|[()]", re.DOTALL)
# Possessive quantifiers, so that a text that does not match causes no backtracking.
_EBNF_PARTS = re.compile(
    r"""\#[^\n]*                                                          # comment
      | \[(?:\\.|[^\]\\])*\]?                                             # character class
      | (?P<macro>\bRegex(?:\s|\#[^\n]*+)*+\((?:\s|\#[^\n]*+)*+)?"(?P<literal>(?:\\.|[^"\\])*)"?
    """,
    re.DOTALL | re.VERBOSE,
)
_EBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)


def check_nesting(grammar: Grammar) -> None:
    """Raise RequestError for a text that nests deeper than the limits above, and for a schema that is not JSON.

    Also for a Regex() of EBNF with syntax that XGrammar ignores. It stays as it was sent: there `.` may be a line
    break.
    """
    regexes: Iterable[str]
    match grammar.kind:
        case "json_schema":
            regexes = _check_schema(grammar.text)
        case "regex":
            regexes = [grammar.text]
        case "ebnf":
            regexes = _regexes_of_ebnf(grammar.text)
        case "calls":  # each schema in it is checked when it is compiled
            regexes = ()
    for regex in regexes:
        if regex_depth(regex) > MAX_REGEX_DEPTH:
            what = "parentheses" if grammar.kind == "regex" else "a regular expression in it"
            raise RequestError(
                f"{grammar.kind}: {what} nested deeper than {MAX_REGEX_DEPTH} levels", param=grammar.kind
            )
        if grammar.kind == "ebnf":
            regex_for_xgrammar(regex, "ebnf")


def regex_depth(regex: str) -> int:
    """Count the levels of parentheses, without those that are escaped or in a character class."""
    depth = deepest = 0
    for part in _REGEX_PARTS.finditer(regex):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _check_schema(schema: str) -> list[str]:
    """Return the regular expressions of a schema, also those of a key that is overwritten by a second one."""
    regexes: list[str] = []

    def collect(pairs: Pairs) -> Pairs:
        for key, value in pairs:
            if key == "pattern" and isinstance(value, str):
                regexes.append(value)
            elif key == "patternProperties" and isinstance(value, _Object):
                regexes.extend(name for name, _ in value)
        return _Object(pairs)

    try:
        tree = json.loads(schema, strict=False, parse_int=float, object_pairs_hook=collect)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"json_schema: Failed to parse JSON: {error}", param="json_schema") from None
    level, depth = [tree], 0
    while level:
        level = [child for node in level for child in _children(node)]
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_deep()
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise RequestError(f"json_schema: {half} is half of a character", param="json_schema") from None
    return regexes


class _Object(Pairs):
    """A JSON object as the pairs that were written, duplicate keys included."""


def _children(node: object) -> Collection[object]:
    if isinstance(node, _Object):
        return [value for _, value in node]
    return node if isinstance(node, list) else ()


def _too_deep() -> RequestError:
    return RequestError(f"json_schema: nested deeper than {MAX_SCHEMA_DEPTH} levels", param="json_schema")


def _regexes_of_ebnf(ebnf: str) -> Iterable[str]:
    """Yield the arguments of XGrammar's macro Regex("..."), without the escapes of EBNF."""
    for part in _EBNF_PARTS.finditer(ebnf):
        if part["macro"]:
            yield _EBNF_ESCAPE.sub(_unescaped, part["literal"])


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    return escape[4] if code is None else chr(min(int(code, 16), 0x10FFFF))
