"""Request bodies as typed models: one definition checks a body, bounds it, and is the OpenAPI document.

A model derives from `Body`. What its types refuse becomes a RequestError that names field, value and bound, in one
wording for all routes. `null` means the default, everywhere; unknown fields are tolerated, since clients of other
servers send them; a known field that cannot be served (`refused`) is refused by name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from shared.errors import RequestError

B = TypeVar("B", bound="Body")

_SHOWN_CHARS = 60
_short = reprlib.Repr()  # looks at no more of a value than it shows
_short.maxstring = _SHOWN_CHARS

_BRANCH = "~"
"""Tags of unions begin with it, so that a branch never looks like a field."""

_EXPECTED: Mapping[str, str] = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le}",
    "string_too_long": "at most {max_length} characters long",
    "string_too_short": "at least {min_length} characters long",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "literal_error": "{expected}",
    "string_unicode": "valid Unicode text",
    "string_pattern_mismatch": "text that matches {pattern}",
}


class Body(BaseModel):
    """A JSON object of a request. Types are exact: 3.0 is no integer, "true" no boolean."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


def parse(kind: type[B], body: bytes) -> B:
    """The body of a request as a `kind`. Raises RequestError."""
    try:
        decoded = msgspec.json.decode(body)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON: {e}") from e
    return validate(kind, decoded)


def validate(kind: type[B], values: object, path: str = "") -> B:
    """Decoded JSON, or a dict of query parameters, as a `kind`; `path` is where it lies in the request."""
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        raise _refusal(e.errors(include_url=False)[0], path) from e


def wrong(name: str, expected: str, value: object) -> RequestError:
    """The error for a field whose value is not what it should be."""
    return RequestError(f"{name} must be {expected}, not {shown(value)}", param=name)


def shown(value: object) -> str:
    """A value as it is quoted in an error message: short, and never a whole prompt."""
    text = "null" if value is None else _short.repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def expecting(phrase: str) -> WrapValidator:
    """Whatever is wrong inside is worded as `phrase`, such as "a string or a list of strings"."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("expected", "{phrase}", {"phrase": phrase}) from None

    return WrapValidator(check)


def refused(*harmless: object, why: str = "not supported yet") -> Any:
    """The type of a known field that cannot be served: anything but a `harmless` value is refused by name.

    A feature that is not there must not be ignored in silence: its user would believe in the answer.
    """

    def check(value: Any) -> Any:
        if any(type(value) is type(h) and value == h for h in harmless):
            return value
        raise PydanticCustomError("refused", "{why}", {"why": why})

    return Annotated[Any, AfterValidator(check), Field(description=f"Refused: {why}.")]


def branch(name: str) -> str:
    """The tag of one branch of a union."""
    return f"{_BRANCH}{name}"


def _refusal(error: ErrorDetails, path: str) -> RequestError:
    name = _dotted(error["loc"], path)
    value, context = error["input"], error.get("ctx", {})
    if not name:
        return RequestError(f"the body must be a JSON object, not {shown(value)}")
    match error["type"]:
        case "missing":
            return RequestError(f"{name} is missing", param=name)
        case "refused":
            return RequestError(
                f"{name} is {context['why']}; leave it out (it was {shown(value)})", param=name
            )
        case "expected":
            return wrong(name, context["phrase"], value)
        case kind:
            expected = _EXPECTED.get(kind)
            if expected is None:
                return RequestError(f"{name}: {error['msg']} (it was {shown(value)})", param=name)
            return wrong(name, expected.format(**context), value)


def _dotted(loc: Sequence[int | str], path: str) -> str:
    name = path
    for step in loc:
        if isinstance(step, int):
            name += f"[{step}]"
        elif not step.startswith(_BRANCH):
            name += f".{step}" if name else step
    return name
