"""Finds keywords of a JSON schema that XGrammar ignores without an error, so that the request is refused.

The rules were found with XGrammar 0.2.8, and tests/unit/grammar/test_schema_keywords.py compares each one with the
library. Two keywords are accepted although they are not enforced exactly. `oneOf` is treated as `anyOf`. A `format`
without a grammar of its own is an annotation, as in JSON Schema. A `pattern` has to match the whole string, which
allows less than JSON Schema does.
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
_IMPLY_TYPE = {
    **dict.fromkeys(("properties", "additionalProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "unevaluatedItems"), "array"),
}
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
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
"""Keywords that allow names which `properties` does not list. Without them XGrammar allows no other names."""
_CONSTRAINTS = (*_ENFORCED_ALONE, *_IMPLY_TYPE, *_NEED_TYPE)
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)


_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_TYPES: dict[type, str] = {
    bool: "boolean", float: "number", str: "string", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_ANY: list[object] = list(_TYPES.values())
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_NOTHING_TO_ESCAPE = re.compile(
    r"""(?: [^"\\\[\x00-\x1f] | \[(?:\\.|[^\]\\])*+\] | \\[^"\\\x00-\x1f0cfnrtuvx] )*+""",
    re.DOTALL | re.VERBOSE,
)
"""Matches a pattern without a literal quote, backslash or control character. `\\x` and `\\u` may stand for one.

XGrammar writes such a literal without the escape that JSON needs. It leaves these characters out of [...] and `.`.
"""


def check_keywords(text: str) -> None:
    """Raise RequestError for a schema with a keyword that XGrammar would ignore. `text` is JSON."""
    root = json.loads(text, strict=False, parse_int=float)
    for path, keyword, why in _ignored(root, "#", root):
        raise RequestError(f"json_schema: {keyword!r} at {path} cannot be enforced{why}", param="json_schema")


def _ignored(schema: object, path: str, root: object) -> Iterator[tuple[str, str, str]]:
    """Yield (path, keyword, reason) of each ignored keyword. The reason follows the words "cannot be enforced"."""
    if not isinstance(schema, dict):
        return
    for keyword, why in _ignored_here(schema, root):
        yield path, keyword, why
    for keyword in _MAPS_OF_SCHEMAS:
        if isinstance(children := schema.get(keyword), dict):
            for name, child in children.items():
                yield from _ignored(child, f"{path}/{keyword}/{name}", root)
    for keyword in _LISTS_OF_SCHEMAS:
        if isinstance(members := schema.get(keyword), list):
            for at, child in enumerate(members):
                yield from _ignored(child, f"{path}/{keyword}/{at}", root)
    for keyword in _SCHEMAS:
        yield from _ignored(schema.get(keyword), f"{path}/{keyword}", root)
    if isinstance(names := schema.get("propertyNames"), dict):
        yield from _ignored({"type": "string", **names}, f"{path}/propertyNames", root)


def _ignored_here(schema: Schema, root: object) -> Iterator[tuple[str, str]]:
    yield from ((keyword, "") for keyword in _NEVER_ENFORCED if keyword in schema)
    if schema.get("uniqueItems") is True:
        yield "uniqueItems", ""
    ref = schema.get("$ref")
    if isinstance(ref, str) and not _is_schema_here(ref):
        yield "$ref", ": only a schema in the schema itself can be referred to, as '#' or '#/$defs/...'"
    keyword = "pattern" if "pattern" in schema else "patternProperties"
    for pattern in [schema.get("pattern"), *_dict(schema.get("patternProperties"))]:
        if isinstance(pattern, str) and _LOOKAROUND.search(pattern):
            yield keyword, " with a lookahead or lookbehind"
        if isinstance(pattern, str) and not _NOTHING_TO_ESCAPE.fullmatch(pattern):
            yield keyword, " with \\x, \\u, a quote, a backslash or a control character outside of [...]"
    deciding = _deciding(schema)
    if deciding is not None:
        if deciding == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) != 1:
            yield "allOf", " unless it has one schema"
        beside = [keyword for keyword in _CONSTRAINTS if keyword in schema and keyword != deciding]
        if deciding == "const" and isinstance(schema.get("enum"), list) and schema["const"] in schema["enum"]:
            beside.remove("enum")  # as pydantic writes a Literal of one value
        yield from ((keyword, f" beside {deciding!r}") for keyword in beside)
        if "type" in schema and not _keeps_to_type(schema, deciding, root):
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
        keyword = keys.pop(0)
        if keyword in (*_MAPS_OF_SCHEMAS, *_LISTS_OF_SCHEMAS) and keys:
            del keys[0]
        elif keyword not in _SCHEMAS:
            return False
    return True


def _keeps_to_type(schema: Schema, deciding: str, root: object) -> bool:
    """Whether all that the keyword `deciding` allows is of the `type` beside it."""
    stated, allowed = _stated_types(schema), _allowed_types({deciding: schema[deciding]}, root)
    return all(name in stated or (name == "integer" and "number" in stated) for name in allowed)


def _stated_types(schema: Schema) -> list[object]:
    types = schema["type"]
    return types if isinstance(types, list) else [types]


def _allowed_types(schema: object, root: object) -> list[object]:
    """The types of what `schema` allows, or more. A stated `type` is believed, since the schema itself is checked."""
    if isinstance(schema, dict) and "type" in schema:
        return _stated_types(schema)
    deciding = _deciding(_dict(schema))
    if deciding is None:
        return next(([_IMPLY_TYPE[keyword]] for keyword in _IMPLY_TYPE if keyword in _dict(schema)), _ANY)
    value = _dict(schema)[deciding]
    if deciding == "$ref":
        target = _target(str(value), root)
        return _stated_types(target) if "type" in target else _ANY
    members = [value] if deciding == "const" else value
    if not isinstance(members, list):
        return _ANY
    if deciding in ("const", "enum"):
        return ["integer" if isinstance(v, float) and v.is_integer() else _TYPES[type(v)] for v in members]
    return [name for member in members for name in _allowed_types(member, root)]


def _deciding(schema: Schema) -> str | None:
    return next((keyword for keyword in _ENFORCED_ALONE if keyword in schema), None)


def _target(ref: str, root: object) -> Schema:
    """The schema that `ref` names; empty where it is not found by names alone."""
    for key in ref.split("/")[1:]:
        root = _dict(root).get(key)
    return _dict(root)


def _dict(value: object) -> Schema:
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
        if ("type" in schema and "number" in _stated_types(schema)) or not whole:
            yield "multipleOf", " but for integers"
        yield from (("multipleOf", f" beside {keyword!r}") for keyword in _RANGE if keyword in schema)
    names, patterns = _dict(schema.get("properties")), _dict(schema.get("patternProperties"))
    if len(patterns) > 1 or (patterns and names):
        yield "patternProperties", " beside 'properties' or another pattern, since both may apply to a name"
    if "propertyNames" in schema and ("properties" in schema or "patternProperties" in schema):
        yield "propertyNames", " beside 'properties' or 'patternProperties'"
    required = schema.get("required")
    if isinstance(required, list) and any(str(name) not in names for name in required):
        yield "required", " for names that are not in 'properties'"
    least = schema.get("minProperties")
    is_open = any(schema.get(keyword, False) is not False for keyword in _OPEN)
    if is_open and isinstance(least, float) and least > 1:
        yield "minProperties", " above 1 where names are free, since a name may be written twice"
