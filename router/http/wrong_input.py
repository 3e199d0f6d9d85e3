"""Turns pydantic's errors about a request into one RequestError that names field, value and bound."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.http.body import BRANCH, Body
from router.http.wording import cut, shown, wrong
from shared.errors import RequestError

_EXPECTED: Mapping[str, str] = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_too_long": "at most {max_length} characters long",
    "string_too_short": "{min_length} or more characters long",
    "too_long": "{field_type} of at most {max_length}",
    "too_short": "{field_type} of {min_length} or more",
    "literal_error": "{expected}",
    "string_unicode": "valid Unicode text",
    "string_pattern_mismatch": "text that matches {pattern}",
}


def wrong_input(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The RequestError of the first of pydantic's errors, whose location begins with "body" or "query"."""
    error = errors[0]
    source, *loc = error["loc"]
    name = _dotted(loc)
    param = _dotted(
        loc if source == "query" else _declared(loc)
    )  # logs have it, so it has no text of the client
    value, context = error["input"], error.get("ctx", {})
    if not name:
        missing = error["type"] == "missing"
        return RequestError(f"the body must be a JSON object, not {'missing' if missing else shown(value)}")
    match error["type"]:
        case "missing":
            return RequestError(f"{name} is missing", param=param)
        case "refused":
            return RequestError(
                f"{name} is {context['why']}; leave it out (it was {shown(value)})", param=param
            )
        case "expected":
            return wrong(name, context["phrase"], value, param=param)
        case other:
            expected = _EXPECTED.get(other)
            if expected is None:
                return RequestError(f"{name}: {error['msg']} (it was {shown(value)})", param=param)
            phrase = expected.format(**{key: _bound(key, v) for key, v in context.items()})
            return wrong(name, phrase, value, param=param)


def _bound(key: str, value: object) -> object:
    if key == "expected":  # the values of a Literal, as pydantic quotes them
        return str(value).replace("'", "")
    if key == "field_type":
        return "a list" if value == "List" else "an object"
    return f"{value:g}" if isinstance(value, float) else value


def _dotted(loc: Iterable[int | str]) -> str:
    name = ""
    for step in loc:
        if isinstance(step, int):
            name += f"[{step}]"
        elif not step.startswith(BRANCH):
            name += f".{cut(step)}" if name else cut(step)
    return name


def _declared(loc: Iterable[int | str]) -> Iterable[int | str]:
    """The location up to its last field. A key of an object may be any text of the client, such as a prompt."""
    known = _field_names()
    return itertools.takewhile(
        lambda step: isinstance(step, int) or step.startswith(BRANCH) or step in known, loc
    )


@functools.cache
def _field_names() -> frozenset[str]:
    """The names of the fields of all bodies."""

    def names(kind: type[Body]) -> Iterable[str]:
        yield from (field.alias or name for name, field in kind.model_fields.items())
        for sub in kind.__subclasses__():
            yield from names(sub)

    return frozenset(names(Body))
