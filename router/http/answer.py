"""The base type of answers, which msgspec encodes and /openapi.json describes."""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Struct, UnsetType


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object of an answer. A field that is UNSET is left out.

    A pydantic model would cost a stream more per event than the event itself. So FastAPI gets only a schema: the
    fields, that an instance needs no further check, and how to encode it.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, handler: Any) -> Any:
        """The fields with their types and descriptions, and the tag of a union as a field."""
        config = cls.__struct_config__
        fields: dict[str, Any] = {
            name: {
                "type": "typed-dict-field",
                "schema": handler.generate_schema(hint),
                "required": is_required,
            }
            for name, hint, is_required in _fields(cls)
        }
        if config.tag_field is not None:
            tag = {"type": "literal", "expected": [config.tag]}
            fields[config.tag_field] = {"type": "typed-dict-field", "schema": tag, "required": True}
        return {
            "type": "json-or-python",
            "json_schema": {
                "type": "typed-dict",
                "cls": cls,
                "fields": fields,
                "extra_behavior": "forbid" if config.forbid_unknown_fields else "allow",
            },
            "python_schema": {"type": "is-instance", "cls": cls},
            "serialization": {"type": "function-plain", "function": msgspec.to_builtins},
            "ref": f"{cls.__module__}.{cls.__qualname__}:{id(cls)}",
        }


@functools.cache  # each route asks for those of its answers, and of all that is in them
def _fields(kind: type[Answer]) -> list[tuple[str, Any, bool]]:
    """The name of each field, its type, and whether every answer has it."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        (field.encode_name, _without_unset(hints[field.name]), field.default is not UNSET)
        for field in msgspec.structs.fields(kind)
    ]


def _without_unset(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        kind, *about = get_args(hint)
        return Annotated[(_without_unset(kind), *about)]
    kinds = [kind for kind in get_args(hint) if kind is not UnsetType]
    return functools.reduce(operator.or_, kinds) if len(kinds) < len(get_args(hint)) else hint
