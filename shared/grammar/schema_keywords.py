"""Refuses what XGrammar would not enforce of a JSON schema, each keyword by its name and path.

XGrammar 0.2.8 ignores keywords that it does not know, and known ones beside some others; it writes numbers with at
most six decimals, and JSON that is none for a few. What it refuses by itself is told in its own words. Each rule here
is held against the library in tests/unit/grammar/test_schema_keywords.py, and
tests/prop/test_structured_output.py checks what is generated for random schemas. A schema that XGrammar would enforce
may be refused too, where a rule that told it apart would be long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from typing import Any

from shared.errors import RequestError
from shared.grammar.regex_syntax import MAX_REPEATS, as_written_for_xgrammar

Schema = dict[str, Any]

MAX_SCHEMA_DEPTH = 256
"""Levels of nesting in a schema. XGrammar's time and memory grow with their cube: 400 objects take 11 s."""
MAX_BOUND = 10**9
"""Largest magnitude of a bound of `number`. XGrammar adds the last of six decimals as a 64-bit float."""
MAX_STATES = 4096
"""XGrammar's time grows with the square of their number: these take 0.3 s of one core."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLES = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
"""Keywords that hold schemas: by name, in a list, or one."""
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these in a schema is enforced. All keywords beside it are ignored."""
_IMPLIED = {
    **dict.fromkeys(("properties", "additionalProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "unevaluatedItems"), "array"),
}
"""Keywords that XGrammar takes for a `type`. Where it has none, it ignores the others below."""
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FAR = Fraction(10**30)
_LENGTHS = ("minLength", "maxLength")
_COUNTS = (*_LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties")
_ANNOTATIONS = (
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "id", "$comment", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "nullable"),
    *("propertyOrdering", "markdownDescription", "errorMessage", "externalDocs"),
)
"""Keywords that constrain nothing, like all that begin with `x-`. `nullable` is OpenAPI's: null is never given."""
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template"),
)
_MAY_BE_EMPTY = ("uri-reference", "uri-template")
"""Formats that allow the empty string. All others keep to a `minLength` of 1."""
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
"""Keywords that allow names which `properties` does not list. Without them XGrammar allows no other names."""
_REF = re.compile(
    r"#(?:/(?:items|additionalProperties|unevaluatedItems|unevaluatedProperties"
    r"|(?:properties|patternProperties|\$defs|definitions)/[^/~%]+))*"
)
"""References that XGrammar follows, to schemas that are checked."""
_TYPES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_ANY = frozenset(_TYPES.values())
_ANYTHING: tuple[Callable[[Any], bool], str] = (lambda _: True, "")
_VALUES = {
    **dict.fromkeys(
        _COUNTS, (lambda v: type(v) is int and 0 <= v < 2**31, "an integer from 0 to 2147483647")
    ),
    **dict.fromkeys(_RANGE, (lambda v: type(v) in (int, float) and abs(v) < 2**64, "a number of 64 bits")),
    **dict.fromkeys(("pattern", "$ref"), (lambda v: isinstance(v, str), "a string")),
    **dict.fromkeys(_MAPS, (lambda v: isinstance(v, dict), "an object")),
    "propertyNames": (
        lambda v: isinstance(v, dict) and v.get("type", "string") == "string",
        "a schema of strings",
    ),
    **dict.fromkeys(
        (*_LISTS, "enum"), (lambda v: isinstance(v, list) and v != [], "a list that is not empty")
    ),
    **dict.fromkeys((*_SINGLES[:-1], "const"), _ANYTHING),
    "format": (
        lambda v: v not in ("json-pointer", "relative-json-pointer"),
        "no pointer, in which XGrammar writes quotes and control characters",
    ),
    "type": (lambda v: v != [], "one name or more"),
    "required": (lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v), "a list of names"),
    "multipleOf": (lambda v: type(v) is int and 0 < v <= 1024, "an integer from 1 to 1024"),
    "uniqueItems": (lambda v: v is False, "false"),
}
"""All keywords that XGrammar enforces. Values that it misreads without an error are refused; it tells the others."""


def check_keywords(text: str, *, in_tags: bool = False) -> str:
    """Return the schema, with patterns as XGrammar reads them. `text` and the result are JSON.

    What it describes is JSON too, or arguments `in_tags`, where strings may have any characters.
    Raises RequestError for what is no schema in JSON, or would not be enforced. It names the keyword and its path.
    """
    root = _read(text)
    num_states, found = 0, list[Schema]()
    for path, schema in _schemas(root, "#"):
        for keyword, why in _dropped(schema, root):
            raise _refused(f"{keyword!r} at {path} cannot be enforced{why}")
        found.append(schema)
        num_states += _num_states(schema)
    if num_states > MAX_STATES:
        raise _refused(
            f"multipleOf and counts of properties need {num_states} states of the grammar, over {MAX_STATES}"
        )
    for schema in found:
        # XGrammar lets control characters into strings with a length, where JSON forbids them.
        if not in_tags and not schema.keys().isdisjoint(_LENGTHS) and schema.get("format") not in _FORMATS:
            most = min(schema.pop("maxLength"), MAX_REPEATS) if "maxLength" in schema else ""
            schema["pattern"] = f".{{{schema.pop('minLength', 0)},{most}}}"
        if "pattern" in schema:
            schema["pattern"] = as_written_for_xgrammar(schema["pattern"], in_json=True)
        if "patternProperties" in schema:
            schema["patternProperties"] = {
                as_written_for_xgrammar(pattern, in_json=True): child
                for pattern, child in schema["patternProperties"].items()
            }
    return json.dumps(root)


def _refused(message: str) -> RequestError:
    return RequestError(f"json_schema: {message}", param="json_schema")


def _read(text: str) -> Any:
    try:
        root = json.loads(text, parse_int=_int64)
        if _depth(root) > MAX_SCHEMA_DEPTH:
            raise RecursionError
    except RecursionError:
        raise _refused(f"nested deeper than {MAX_SCHEMA_DEPTH} levels") from None
    except ValueError as error:
        raise _refused(f"Failed to parse JSON: {error}") from None
    return root


def _int64(digits: str) -> int:
    """XGrammar writes other integers as floats."""
    value = int(digits)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{digits[:30]} is beyond 64 bits")
    return value


def _depth(node: object) -> int:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return 1 + max(map(_depth, children), default=0)


def _schemas(schema: object, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield each schema with its path, before those in it."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in (*_MAPS, *_LISTS):
        children = schema.get(keyword, {})
        for name, child in children.items() if isinstance(children, dict) else enumerate(children):
            yield from _schemas(child, f"{path}/{keyword}/{name}")
    if "propertyNames" in schema:
        schema["propertyNames"] = {"type": "string", **schema["propertyNames"]}
    for keyword in _SINGLES:
        yield from _schemas(schema.get(keyword), f"{path}/{keyword}")


def _dropped(schema: Schema, root: object) -> Iterator[tuple[str, str]]:
    """Yield (keyword, reason) of what is ignored in a schema. The reason follows the words "cannot be enforced"."""
    alone = next((keyword for keyword in _ALONE if keyword in schema), None)
    if alone == "const" and json.dumps([schema["const"]]) == json.dumps(schema.get("enum")):
        del schema["enum"]  # as pydantic writes a Literal of one value
    has_type = "type" in schema or not _IMPLIED.keys().isdisjoint(schema)
    for keyword, value in schema.items():
        is_free = keyword in _ANNOTATIONS or keyword.startswith("x-")
        fits, what = _VALUES.get(keyword, _ANYTHING)
        if keyword not in _VALUES and not is_free:
            yield keyword, ""
        elif not fits(value):
            shown = json.dumps(value)
            yield keyword, f": it must be {what}, not {shown if len(shown) <= 20 else shown[:20] + '...'}"
        elif alone is not None and not is_free and keyword not in (alone, "type"):
            yield keyword, f" beside {alone!r}"
        elif alone is None and not is_free and not has_type:
            yield keyword, " without 'type'"
    if alone is not None:
        yield from _dropped_of_choices(schema, alone, root)
        return
    yield from _dropped_of_strings(schema)
    yield from _dropped_of_numbers(schema, _types(schema))
    yield from _dropped_of_objects(schema)


def _dropped_of_choices(schema: Schema, alone: str, root: object) -> Iterator[tuple[str, str]]:
    value = schema[alone]
    if alone == "$ref" and not _REF.fullmatch(value):
        yield "$ref", ": only a schema in the schema itself can be referred to, as '#' or '#/$defs/...'"
    if alone == "allOf" and len(value) != 1:
        yield "allOf", " unless it has one schema"
    if "type" in schema:
        members = [schema] if alone == "$ref" else [value] if alone == "const" else value
        if alone in ("const", "enum"):
            allowed = {_TYPES[type(member)] for member in members}
        else:
            allowed = {name for member in members for name in _types(_target(member, root))}
        stated = _types({"type": schema["type"]})
        if not allowed <= stated | ({"integer"} if "number" in stated else set()):
            yield "type", f" beside {alone!r}, which may allow other types"


def _types(schema: object) -> frozenset[str]:
    """The types that a schema states or else implies; all, where it does neither."""
    types = schema.get("type", []) if isinstance(schema, dict) else []
    if isinstance(schema, dict) and not types and all(keyword not in schema for keyword in _ALONE):
        types = [name for keyword, name in _IMPLIED.items() if keyword in schema]
    names = types if isinstance(types, list) else [types]
    return frozenset(name for name in names if isinstance(name, str)) or _ANY


def _target(schema: object, root: Any) -> object:
    """The schema itself, or what it refers to. None where there is none, which XGrammar tells."""
    if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
        return schema
    for key in schema["$ref"].split("/")[1:]:
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _dropped_of_strings(schema: Schema) -> Iterator[tuple[str, str]]:
    has_format = schema.get("format") in _FORMATS
    spelled = "format" if has_format else "pattern"
    for keyword in ("pattern", *_LENGTHS) if spelled in schema else ():
        is_kept = has_format and keyword == "minLength" and schema["format"] not in _MAY_BE_EMPTY
        if keyword in schema and keyword != spelled and not (is_kept and schema["minLength"] < 2):
            yield keyword, f" beside {spelled!r}"
    patterns = {"pattern": [schema["pattern"]]} if "pattern" in schema else {}
    for keyword, texts in {**patterns, "patternProperties": schema.get("patternProperties", ())}.items():
        for text in texts:
            try:
                as_written_for_xgrammar(text, in_json=True)
            except ValueError as found:
                yield keyword, f": {found}"


def _dropped_of_numbers(schema: Schema, types: Collection[str]) -> Iterator[tuple[str, str]]:
    """XGrammar writes numbers with a bound with at most six decimals, and nothing where none is within the bounds."""
    bounds = {keyword: Fraction(str(schema[keyword])) * 10**6 for keyword in _RANGE if keyword in schema}
    if "multipleOf" in schema and (bounds or "number" in types):
        yield "multipleOf", " but for integers without bounds"
    for keyword, bound in bounds.items() if "number" in types else ():
        if bound % 1 or abs(bound) > MAX_BOUND * 10**6:
            yield keyword, f" of numbers with more than six decimals, or above {MAX_BOUND} in magnitude"
    lowest = max(bounds.get("minimum", -_FAR), bounds.get("exclusiveMinimum", -_FAR) + 1)
    highest = min(bounds.get("maximum", _FAR), bounds.get("exclusiveMaximum", _FAR) - 1)
    if lowest > highest:
        yield next(iter(bounds)), ": no number of six decimals is within the bounds"


def _dropped_of_objects(schema: Schema) -> Iterator[tuple[str, str]]:
    names, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if len(patterns) > 1 or (patterns and names):
        yield "patternProperties", " beside 'properties' or another pattern, since both may apply to a name"
    closing: list[str] = [keyword for keyword in _MAPS[:2] if keyword in schema]
    closing += [keyword for keyword in _OPEN[:2] if schema.get(keyword) is False]
    if "propertyNames" in schema and closing:
        yield "propertyNames", f" beside {closing[0]!r}"
    if any(name not in names for name in schema.get("required", [])):
        yield "required", " for names that are not in 'properties'"
    is_open = any(schema.get(keyword, False) is not False for keyword in _OPEN)
    if is_open and schema.get("minProperties", 0) > 1:
        yield "minProperties", " above 1 where names are free, since a name may be written twice"
    if is_open and any(json.dumps(name) != f'"{name}"' for name in names):
        yield "properties", " with a name outside ASCII or with an escape, where other names are free"


def _num_states(schema: Schema) -> int:
    """What MAX_STATES limits: a `multipleOf` needs as many as its value, an object one for each name and count."""
    if schema.get("minProperties") or schema.get("maxProperties"):
        num_names = len(schema.get("properties", {}))
        most: int = min(num_names, schema.get("maxProperties", num_names))
        return num_names * max(1, most - int(schema.get("minProperties", 0)) + 1)
    return int(schema.get("multipleOf", 0))
