"""Request bodies as typed models: one definition checks a body, bounds it, and is the OpenAPI document.

A model derives from `Body`. What its types refuse becomes a RequestError that names field, value and bound, in one
wording for all routes. `null` means the default, everywhere; unknown fields are tolerated, since clients of other
servers send them; a known field that cannot be served (`Refused`) is refused by name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from router.http.wording import cut, shown, wrong
from shared.errors import RequestError

T = TypeVar("T")
B = TypeVar("B", bound="Body")

_MAX_BRACKETS = 1 << 18
"""Opening ones. A body of nothing but tiny lists takes 2 us for each to decode, and no other request gets on
meanwhile; texts that hold so many are longer than any prompt."""

_BRANCH = "~"
"""Tags of unions begin with it, so that a branch never looks like a field."""

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


class Body(BaseModel):
    """A JSON object of a request. Types are exact: 3.0 is no integer, "true" no boolean."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """As pydantic says it, and that whatever may be left out may be null."""
        described = handler(schema)
        whole = handler.resolve_ref_schema(described)
        for name, field in whole.get("properties", {}).items():
            if name not in whole.get("required", ()):
                whole["properties"][name] = _or_null(field)
        return described


def parse(kind: type[B], body: bytes) -> B:
    """The body of a request as a `kind`. Raises RequestError."""
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise RequestError(f"the body has more than {_MAX_BRACKETS} lists and objects")
    try:
        decoded = msgspec.json.decode(body)
    except UnicodeDecodeError as e:
        raise RequestError(f"the body is not valid UTF-8{_first_bad_byte(body)}") from e
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON: {e}") from e
    return validate(kind, decoded)


def validate(kind: type[B], values: object, path: str = "") -> B:
    """Decoded JSON, or a dict of query parameters, as a `kind`; `path` is where it lies in the request."""
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        raise _refusal(kind, e.errors(include_url=False)[0], path) from e


def must(expected: str, holds: Callable[[Any], bool]) -> AfterValidator:
    """A bound that types cannot say: the value, `expected` in words, has to satisfy `holds`."""

    def check(value: T) -> T:
        if not holds(value):
            raise PydanticCustomError("expected", "{phrase}", {"phrase": expected})
        return value

    return AfterValidator(check)


class FailFast(pydantic.FailFast):
    """Ends the check of a list at its first wrong item. Hashable, as whatever stands in a union has to be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


class OneOf:
    """Chooses the type of a field by the JSON type of its value: `Annotated[str | list[str], OneOf(phrase, {...})]`.

    Keys of `branches` are "str", "int", "bool", "dict", "list", or "list[str]" and so on, by the first item of a
    list; a list that begins with null counts as one of lists. `phrase` says what is expected when none fits.
    """

    def __init__(self, phrase: str, branches: Mapping[str, Any]) -> None:
        self._phrase = phrase
        self._branches = branches
        self._empty_list = next((kind for kind in branches if kind.startswith("list")), "list")

    def __get_pydantic_core_schema__(self, _: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A union whose branch is known, so that only that branch's complaint is told."""
        return core_schema.tagged_union_schema(
            {_BRANCH + kind: handler.generate_schema(branch) for kind, branch in self._branches.items()},
            lambda value: _BRANCH + self._kind(value),
            custom_error_type="expected",
            custom_error_message="{phrase}",
            custom_error_context={"phrase": self._phrase},
        )

    def _kind(self, value: Any) -> str:
        if not isinstance(value, list) or "list" in self._branches:
            return type(value).__name__
        if not value:
            return self._empty_list
        return f"list[{'list' if value[0] is None else type(value[0]).__name__}]"


@dataclass(frozen=True)
class Refused:
    """Marks a known field that cannot be served: anything but a `harmless` value is refused by name.

    A feature that is not there must not be ignored in silence: its user would believe in the answer.
    """

    harmless: tuple[object, ...] = ()
    why: str = "not supported yet"

    def __get_pydantic_core_schema__(self, _: object, __: GetCoreSchemaHandler) -> CoreSchema:
        """Any value, and then the check."""
        return core_schema.no_info_after_validator_function(self._check, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The harmless values."""
        return {"enum": [None, *self.harmless], "description": f"Refused: {self.why}."}

    def _check(self, value: object) -> object:
        for_all = value if isinstance(value, list) else [value]  # a batch may have one for each prompt
        if self._is_harmless(value) or all(self._is_harmless(one) for one in for_all):
            return value
        raise PydanticCustomError("refused", "{why}", {"why": self.why})

    def _is_harmless(self, value: object) -> bool:
        return value is None or any(type(value) is type(h) and value == h for h in self.harmless)


def _or_null(field: JsonSchemaValue) -> JsonSchemaValue:
    null = {"type": "null"}
    if None in field.get("enum", ()) or null in field.get("anyOf", ()):
        return field
    about = {key: field[key] for key in ("title", "description", "default", "examples") if key in field}
    bare = {key: value for key, value in field.items() if key not in about}
    branches: list[JsonSchemaValue] = bare["anyOf"] if set(bare) == {"anyOf"} else [bare]
    return about | {"anyOf": [*branches, null]}


def _refusal(kind: type[Body], error: ErrorDetails, path: str) -> RequestError:
    name = _dotted(error["loc"], path)
    param = _dotted(_declared(error["loc"], kind), path)  # ends up in logs
    value, context = error["input"], error.get("ctx", {})
    if not name:
        return RequestError(f"the body must be a JSON object, not {shown(value)}")
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


def _dotted(loc: Sequence[int | str], path: str) -> str:
    name = path
    for step in loc:
        if isinstance(step, int):
            name += f"[{step}]"
        elif not step.startswith(_BRANCH):
            name += f".{cut(step)}" if name else cut(step)
    return name


def _declared(loc: Sequence[int | str], kind: type[Body]) -> Sequence[int | str]:
    """As far as it consists of fields: a key of an object may be anything, also a prompt."""
    known = _field_names(kind)
    return tuple(
        itertools.takewhile(
            lambda step: isinstance(step, int) or step.startswith(_BRANCH) or step in known, loc
        )
    )


@functools.cache
def _field_names(kind: type[Body]) -> frozenset[str]:
    """Of `kind` and of all objects in it."""
    schema = kind.model_json_schema()
    return frozenset(
        name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", ())
    )


def _first_bad_byte(body: bytes) -> str:
    """Where in the body it is; msgspec counts from where a string begins."""
    try:
        body.decode()
    except UnicodeDecodeError as e:
        return f": byte {e.start} is 0x{body[e.start]:02x}"
    return ""
