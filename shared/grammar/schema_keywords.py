"""Finds keywords of a JSON schema that XGrammar ignores without an error, so that the request is refused.

The rules were found with XGrammar 0.2.8, and tests/unit/grammar/test_schema_keywords.py compares each one with the
library. Two keywords are accepted although they are not enforced exactly. `oneOf` is treated as `anyOf`. A `format`
without a grammar of its own is an annotation, as in JSON Schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shared.errors import RequestError

Schema = dict[str, Any]

_NEVER_ENFORCED = (
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
_ENFORCED_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these in a schema is enforced. All keywords beside it are ignored, except `type`."""
_IMPLY_TYPE = (
    "properties",
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "prefixItems",
    "unevaluatedItems",
)
_LENGTHS = ("minLength", "maxLength")
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NEED_TYPE = (
    *_LENGTHS,
    *_RANGE,
    "pattern",
    "format",
    "multipleOf",
    "minItems",
    "maxItems",
    "required",
    "minProperties",
    "maxProperties",
    "patternProperties",
    "propertyNames",
)
_CONSTRAINTS = (*_ENFORCED_ALONE, *_IMPLY_TYPE, *_NEED_TYPE)
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)


_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
_TYPES: dict[type, str] = {
    bool: "boolean", float: "number", str: "string", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_LOOKAROUND = re.compile(r"\(\?<?[=!]")


def check_keywords(text: str) -> None:
    """Raise RequestError for a schema with a keyword that XGrammar would ignore. `text` is JSON."""
    for path, keyword, why in _ignored(json.loads(text, strict=False, parse_int=float), "#"):
        raise RequestError(f"json_schema: {keyword!r} at {path} cannot be enforced{why}", param="json_schema")


def _ignored(schema: object, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, keyword, reason) of each ignored keyword. The reason follows the words "cannot be enforced"."""
    if not isinstance(schema, dict):
        return
    for keyword, why in _ignored_here(schema):
        yield path, keyword, why
    for keyword in _MAPS_OF_SCHEMAS:
        if isinstance(children := schema.get(keyword), dict):
            for name, child in children.items():
                yield from _ignored(child, f"{path}/{keyword}/{name}")
    for keyword in _LISTS_OF_SCHEMAS:
        if isinstance(members := schema.get(keyword), list):
            for at, child in enumerate(members):
                yield from _ignored(child, f"{path}/{keyword}/{at}")
    for keyword in _SCHEMAS:
        names = keyword == "propertyNames" and isinstance(schema.get(keyword), dict)
        child = {"type": "string", **schema[keyword]} if names else schema.get(keyword)
        yield from _ignored(child, f"{path}/{keyword}")


def _ignored_here(schema: Schema) -> Iterator[tuple[str, str]]:
    yield from ((keyword, "") for keyword in _NEVER_ENFORCED if keyword in schema)
    if schema.get("uniqueItems") is True:
        yield "uniqueItems", ""
    ref = schema.get("$ref")
    if isinstance(ref, str) and not _is_schema_here(ref):
        yield "$ref", ": only a schema in the schema itself can be referred to, as '#' or '#/$defs/...'"
    patterns = [schema.get("pattern"), *_dict(schema.get("patternProperties"))]
    if any(isinstance(pattern, str) and _LOOKAROUND.search(pattern) for pattern in patterns):
        yield ("pattern" if "pattern" in schema else "patternProperties"), " with a lookahead or lookbehind"
    deciding = next((keyword for keyword in _ENFORCED_ALONE if keyword in schema), None)
    if deciding is not None:
        if deciding == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
            yield "allOf", " with more than one schema"
        beside = [keyword for keyword in _CONSTRAINTS if keyword in schema and keyword != deciding]
        if deciding == "const" and isinstance(schema.get("enum"), list) and schema["const"] in schema["enum"]:
            beside.remove("enum")  # as pydantic writes a Literal of one value
        yield from ((keyword, f" beside {deciding!r}") for keyword in beside)
        if "type" in schema and not _keeps_to_type(schema, deciding):
            yield "type", f" beside {deciding!r}"
    elif "type" in schema or any(keyword in schema for keyword in _IMPLY_TYPE):
        yield from _ignored_beside(schema)
    else:
        yield from ((keyword, " without 'type'") for keyword in _NEED_TYPE if keyword in schema)


def _is_schema_here(ref: str) -> bool:
    """Whether `ref` leads through keywords that hold schemas, all of which are checked."""
    keys = ref.split("/")
    if keys.pop(0) != "#":
        return False
    while keys:
        if keys[0] not in (*_MAPS_OF_SCHEMAS, *_LISTS_OF_SCHEMAS, *_SCHEMAS):
            return False
        del keys[: 1 if keys[0] in _SCHEMAS else 2]
    return True


def _keeps_to_type(schema: Schema, deciding: str) -> bool:
    """Whether what the keyword `deciding` allows is of the `type` beside it, as far as its members state theirs."""
    allowed = _types(schema)
    members = [schema["const"]] if deciding == "const" else schema[deciding]
    if deciding == "$ref" or not isinstance(members, list):
        return False
    if deciding in ("const", "enum"):
        named = [_TYPES[type(value)] for value in members]
        whole = [isinstance(value, float) and value.is_integer() for value in members]
        return all(
            name in allowed or ("integer" in allowed and is_whole)
            for name, is_whole in zip(named, whole, strict=True)
        )
    stated = [
        name for member in members if isinstance(member, dict) and "type" in member for name in _types(member)
    ]
    return all(name in allowed or (name == "integer" and "number" in allowed) for name in stated)


def _types(schema: Schema) -> list[object]:
    types = schema["type"]
    return types if isinstance(types, list) else [types]


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _ignored_beside(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield the keywords that are ignored beside another one of the same type."""
    has_format = str(schema.get("format")) in _FORMATS
    if has_format and "pattern" in schema:
        yield "pattern", " beside 'format'"
    spelled = "format" if has_format else "pattern"
    if spelled in schema:
        yield from ((keyword, f" beside {spelled!r}") for keyword in _LENGTHS if keyword in schema)
    if "multipleOf" in schema:
        factor = schema["multipleOf"]
        whole = isinstance(factor, float) and factor.is_integer()
        if ("type" in schema and "number" in _types(schema)) or not whole:
            yield "multipleOf", " but for integers"
        yield from (("multipleOf", f" beside {keyword!r}") for keyword in _RANGE if keyword in schema)
    keyed = next((keyword for keyword in ("patternProperties", "propertyNames") if keyword in schema), None)
    if keyed is not None:
        if "propertyNames" in schema and ("properties" in schema or "patternProperties" in schema):
            yield "propertyNames", " beside 'properties' or 'patternProperties'"
        names, required = _dict(schema.get("properties")), schema.get("required")
        if isinstance(required, list) and any(str(name) not in names for name in required):
            yield "required", f" beside {keyed!r}, for names that are not in 'properties'"
