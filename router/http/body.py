"""Request bodies as typed models: one definition checks a body, bounds it, and is the OpenAPI document.

A model derives from `Body` and is the parameter of a handler, so FastAPI validates it; `wrong_input` writes errors.
`null` means the default, everywhere. Unknown fields are ignored, since clients of other servers send them. A known
field that cannot be served (`Refused`) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")

BRANCH = "~"
"""The prefix of a union's tags, which tells them from fields in the location of an error."""


class Body(BaseModel):
    """A JSON object of a request. Types are exact: 3.0 is not an integer, and "true" is not a boolean."""

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
        """Pydantic's schema, in which a field that may be left out may be null too."""
        described = handler(schema)
        whole = handler.resolve_ref_schema(described)
        for name, field in whole.get("properties", {}).items():
            if name not in whole.get("required", ()):
                whole["properties"][name] = _or_null(field)
        return described


def must(expected: str, holds: Callable[[Any], bool]) -> AfterValidator:
    """A bound that types do not have: the value must satisfy `holds`; errors say `expected`."""

    def check(value: T) -> T:
        if not holds(value):
            raise PydanticCustomError("expected", "{phrase}", {"phrase": expected})
        return value

    return AfterValidator(check)


class FailFast(pydantic.FailFast):
    """Ends the check of a list at its first wrong item. It is hashable, as types in a union must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


class OneOf:
    """Chooses the type of a field by the JSON type of its value: `Annotated[str | list[str], OneOf(phrase, {...})]`.

    Keys of `branches` are "str", "int", "bool", "dict", "list", or "list[str]" and so on, by the first item of a
    list; a list that begins with null counts as one of lists. "dict[text]" is an object whose `type` is text. The
    error says `phrase` when no branch fits.
    """

    def __init__(self, phrase: str, branches: Mapping[str, Any]) -> None:
        self._phrase = phrase
        self._branches = branches
        self._empty_list = next((kind for kind in branches if kind.startswith("list")), "list")

    def __get_pydantic_core_schema__(self, _: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A tagged union, so that errors come from one branch only."""
        return core_schema.tagged_union_schema(
            {BRANCH + kind: handler.generate_schema(branch) for kind, branch in self._branches.items()},
            lambda value: BRANCH + self._kind(value),
            custom_error_type="expected",
            custom_error_message="{phrase}",
            custom_error_context={"phrase": self._phrase},
        )

    def _kind(self, value: Any) -> str:
        if isinstance(value, dict):
            of_its_type = f"dict[{value.get('type')}]"
            return of_its_type if of_its_type in self._branches else "dict"
        if not isinstance(value, list) or "list" in self._branches:
            return type(value).__name__
        if not value:
            return self._empty_list
        return f"list[{'list' if value[0] is None else type(value[0]).__name__}]"


@dataclass(frozen=True)
class Refused:
    """Marks a known field that cannot be served: any value but a `harmless` one is refused by name.

    An answer that ignored the field would look as if it followed it.
    """

    harmless: tuple[object, ...] = ()
    why: str = "not supported yet"

    def __get_pydantic_core_schema__(self, _: object, __: GetCoreSchemaHandler) -> CoreSchema:
        """Any type, with the check."""
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
