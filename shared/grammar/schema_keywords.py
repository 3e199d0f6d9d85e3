"""Lets in the keywords of a JSON schema that XGrammar is known to enforce. A request with any other one is refused.

The rules were found with XGrammar 0.2.8. tests/unit/grammar/test_schema_keywords.py compares each one with the
library, and tests/prop/test_structured_output.py checks what is generated for random schemas. Two keywords are
accepted although they are not enforced exactly. `oneOf` is treated as `anyOf`. A `format` without a grammar of its
own is an annotation, as in JSON Schema. A `pattern` has to match the whole string, which allows less than JSON Schema
does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shared.errors import RequestError
from shared.grammar.regex_syntax import as_written_for_xgrammar

Schema = dict[str, Any]

_ENFORCED_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these in a schema is enforced. All keywords beside it are ignored, except `type`."""
_IMPLY_TYPE = {
    **dict.fromkeys(("properties", "additionalProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "unevaluatedItems"), "array"),
}
MAX_STATES = 4096
"""XGrammar's time grows with the square of their number: these take 0.3 s of one core. A `multipleOf` needs as many
as its value. An object needs one for each name and each number of names from the least to the most."""
_LENGTHS = ("minLength", "maxLength")
_FAR = Fraction(2**64)
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_EXCLUSIVE = 10**9
"""Largest magnitude of an exclusive bound. XGrammar adds its last of six decimals as a 64-bit float."""
_COUNTS = (*_LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties")
_NEED_TYPE = (
    *(*_COUNTS, *_RANGE, "pattern", "format", "multipleOf"),
    *("required", "patternProperties", "propertyNames", "uniqueItems"),
)
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
"""Keywords that allow names which `properties` does not list. Without them XGrammar allows no other names."""
_CONSTRAINTS = (*_ENFORCED_ALONE, *_IMPLY_TYPE, *_NEED_TYPE)
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template"),
)
_MAY_BE_EMPTY = ("uri-reference", "uri-template")
"""Formats that allow the empty string. All others keep to a `minLength` of 1."""
_ANNOTATIONS = (
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$comment", "$anchor", "$dynamicAnchor", "$vocabulary", "discriminator", "nullable"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
    *("propertyOrdering", "markdownDescription", "errorMessage", "externalDocs"),
)
"""Keywords that constrain nothing, like all that begin with `x-`. `nullable` is OpenAPI's: null is never given."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE_SCHEMAS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_TYPES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_ANY: list[object] = list(_TYPES.values())
_NOTHING_TO_ESCAPE = re.compile(
    r"""(?: [^"\\\[\x00-\x1f]
          | \[ (?! (?: ["\x00-\x1f-] | \\["\\0bfnrtv-] | \\(?:x|u00)(?: [01]. | 22 | 5[cC] ) )++ \] )
            (?: \\. | [^\]\\] )*+ \]
          | \\[^"\\\x00-\x1f0cfnrtuvx] )*+""",
    re.DOTALL | re.VERBOSE,
)
"""Matches a pattern without a literal quote, backslash or control character. `\\x` and `\\u` may stand for one.

XGrammar writes such a literal without the escape that JSON needs. It leaves these characters out of [...] and `.`,
unless nothing else is in a [...].
"""


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63 - 1  # type: ignore[arg-type]


def _is_exact(value: object) -> bool:
    """Whether XGrammar writes all numbers in a value as they are: not infinity, nor integers beyond 64 bits."""
    if isinstance(value, list | dict):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return (
        -(2**63) <= value < 2**63
        if type(value) is int
        else not isinstance(value, float) or math.isfinite(value)
    )


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        _COUNTS, (lambda v: type(v) is int and 0 <= v < 2**31, "an integer from 0 to 2147483647")
    ),
    **dict.fromkeys(_RANGE, (_is_number, "a number between -2^63 and 2^63")),
    "format": (
        lambda v: isinstance(v, str) and v not in ("json-pointer", "relative-json-pointer"),
        "a string, but not a pointer, in which XGrammar writes quotes and control characters",
    ),
    **dict.fromkeys(("pattern", "$ref", "$id", "id"), (lambda v: isinstance(v, str), "a string")),
    **dict.fromkeys(MAPS_OF_SCHEMAS, (lambda v: isinstance(v, dict), "an object")),
    **dict.fromkeys(
        LISTS_OF_SCHEMAS, (lambda v: isinstance(v, list) and bool(v), "a list that is not empty")
    ),
    **dict.fromkeys(SINGLE_SCHEMAS, (lambda v: isinstance(v, dict | bool), "a schema")),
    "prefixItems": (
        lambda v: isinstance(v, list) and bool(v) and all(isinstance(child, dict) for child in v),
        "a list of schemas that are objects, and not empty",
    ),
    "propertyNames": (
        lambda v: isinstance(v, dict) and v.get("type", "string") == "string",
        "a schema of strings",
    ),
    "const": (_is_exact, "a value without integers beyond 64 bits and infinity"),
    "enum": (
        lambda v: isinstance(v, list) and bool(v) and _is_exact(v),
        "a list that is not empty and has no integers beyond 64 bits and no infinity",
    ),
    "type": (
        lambda v: v != [] and all(name in (*_ANY, "integer") for name in (v if isinstance(v, list) else [v])),
        f"one or more of {', '.join(dict.fromkeys(_TYPES.values()))}",
    ),
    "required": (
        lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
        "a list of names",
    ),
    "multipleOf": (lambda v: _is_number(v) and v in range(1, 1025), "an integer from 1 to 1024"),
    "uniqueItems": (lambda v: v is False, "false"),
}
"""All keywords that XGrammar enforces, what it takes as their value, and that in words."""


def check_keywords(text: str) -> str:
    """Return the schema, with patterns as XGrammar reads them. `text` and the result are JSON.

    Raises RequestError for a schema that XGrammar would not enforce. It names the keyword and its path.
    """
    root = json.loads(
        text, strict=False, parse_int=lambda digits: int(digits[:21])
    )  # beyond 64 bits in any case
    walk = _Walk(root)
    for path, keyword, why in _ignored(root, "#", walk):
        raise RequestError(f"json_schema: {keyword!r} at {path} cannot be enforced{why}", param="json_schema")
    return json.dumps(root)


@dataclass
class _Walk:
    """What is known of the whole schema while its parts are checked."""

    root: object
    num_states: int = 0
    num_bases: int = 0
    """How many bases of references, other than the root, are around the part."""


def _ignored(schema: object, path: str, walk: _Walk) -> Iterator[tuple[str, str, str]]:
    """Yield (path, keyword, reason) of each ignored keyword. The reason follows the words "cannot be enforced".

    Once all of a schema was yielded, its patterns are changed to what XGrammar reads in the same way.
    """
    if not isinstance(schema, dict):
        return
    if _is_any_name(schema.get("propertyNames")) and not {"properties", *_OPEN[:3]}.isdisjoint(schema):
        del schema["propertyNames"]
    for keyword, why in _ignored_here(schema, walk.root):
        yield path, keyword, why
    keyword, num_states = _num_states(schema)
    walk.num_states += num_states
    if walk.num_states > MAX_STATES:
        why = f": with what is before it, it needs {walk.num_states} states of the grammar, over {MAX_STATES}"
        yield path, keyword, why
    is_base = path != "#" and not {"$id", "id"}.isdisjoint(schema)
    walk.num_bases += is_base
    if walk.num_bases and "$ref" in schema:
        yield path, "$ref", " below '$id' or 'id', but at the root, since it is the base of references"
    for keyword in (*MAPS_OF_SCHEMAS, *LISTS_OF_SCHEMAS):
        children = schema.get(keyword, {})
        for name, child in children.items() if isinstance(children, dict) else enumerate(children):
            if not isinstance(child, dict) and child is not True:
                yield f"{path}/{keyword}/{name}", keyword, _expected("a schema that allows something", child)
            yield from _ignored(child, f"{path}/{keyword}/{name}", walk)
    for keyword in SINGLE_SCHEMAS:
        yield from _ignored(schema.get(keyword), f"{path}/{keyword}", walk)
    if "propertyNames" in schema:
        names = {"type": "string", **schema["propertyNames"]}
        yield from _ignored(names, f"{path}/propertyNames", walk)
        schema["propertyNames"] = names
    walk.num_bases -= is_base
    if "pattern" in schema:
        schema["pattern"] = as_written_for_xgrammar(schema["pattern"], in_json=True)
    if "patternProperties" in schema:
        schemas = schema["patternProperties"].items()
        schema["patternProperties"] = {
            as_written_for_xgrammar(pattern, in_json=True): child for pattern, child in schemas
        }


def _is_annotation(keyword: str) -> bool:
    return keyword in _ANNOTATIONS or keyword.startswith("x-")


def _is_any_name(names: object) -> bool:
    """Whether a `propertyNames` allows all names."""
    return isinstance(names, dict) and all(
        value == "string" if keyword == "type" else _is_annotation(keyword)
        for keyword, value in names.items()
    )


def _num_states(schema: Schema) -> tuple[str, int]:
    """The keyword that costs the most, and what MAX_STATES limits."""
    if "multipleOf" in schema:
        return "multipleOf", int(schema["multipleOf"])
    counted = next((keyword for keyword in ("minProperties", "maxProperties") if schema.get(keyword)), None)
    if counted is None:
        return "", 0
    num_names = len(schema.get("properties", {}))
    most = min(num_names, schema.get("maxProperties", num_names))
    return counted, num_names * max(1, most - schema.get("minProperties", 0) + 1)


def _expected(what: str, value: object) -> str:
    shown = json.dumps(value)
    return f": it must be {what}, not {shown if len(shown) <= 20 else shown[:20] + '...'}"


def _ignored_here(schema: Schema, root: object) -> Iterator[tuple[str, str]]:
    ref = schema.get("$ref")
    if isinstance(ref, str) and not _is_schema_here(ref):
        yield "$ref", ": only a schema in the schema itself can be referred to, as '#' or '#/$defs/...'"
    elif isinstance(ref, str) and _target(ref, root) is None:
        yield "$ref", f": there is no schema at {ref}"
    elif isinstance(ref, str) and _leads_to_itself(schema, root):
        yield "$ref", ": it leads to nothing but itself"
    for keyword, value in schema.items():
        is_right, what = _VALUES.get(keyword, (None, ""))
        if is_right is None and not _is_annotation(keyword):
            yield keyword, ""
        if is_right is not None and not is_right(value):
            yield keyword, _expected(what, value)
    keyword = "pattern" if "pattern" in schema else "patternProperties"
    for pattern in [schema["pattern"]] if "pattern" in schema else schema.get("patternProperties", {}):
        try:
            as_written_for_xgrammar(pattern, in_json=True)
        except ValueError as found:
            yield keyword, f" with {found}"
        if not _NOTHING_TO_ESCAPE.fullmatch(pattern):
            yield keyword, " with \\x, \\u, a quote, a backslash or a control character outside of [...]"
    deciding = _deciding(schema)
    if deciding is not None:
        if deciding == "allOf" and len(schema["allOf"]) != 1:
            yield "allOf", " unless it has one schema"
        beside = [keyword for keyword in _CONSTRAINTS if keyword in schema and keyword != deciding]
        if deciding == "const" and json.dumps(schema["const"]) in map(json.dumps, schema.get("enum", [])):
            beside.remove("enum")  # as pydantic writes a Literal of one value
        yield from ((keyword, f" beside {deciding!r}") for keyword in beside)
        if "type" in schema and not _keeps_to_type(schema, deciding, root):
            yield "type", f" beside {deciding!r}, which allows other types"
    elif "type" in schema or any(keyword in schema for keyword in _IMPLY_TYPE):
        yield from _ignored_beside(schema)
    else:
        yield from ((keyword, " without 'type'") for keyword in _NEED_TYPE if keyword in schema)


def _is_schema_here(ref: str) -> bool:
    """Whether `ref` leads through keywords that hold schemas, all of which are checked."""
    keys = ref.split("/")
    if keys.pop(0) != "#" or "" in keys or "~" in ref or "%" in ref:  # XGrammar does not read these
        return False
    while keys:
        keyword = keys.pop(0)
        if keyword in MAPS_OF_SCHEMAS and keys:
            del keys[0]
        elif keyword not in SINGLE_SCHEMAS:
            return False
    return True


def _keeps_to_type(schema: Schema, deciding: str, root: object) -> bool:
    """Whether all that the keyword `deciding` allows is of the `type` beside it."""
    stated, allowed = _stated_types(schema), _allowed_types({deciding: schema[deciding]}, root)
    return all(name in stated or (name == "integer" and "number" in stated) for name in allowed)


def _stated_types(schema: Schema) -> list[object]:
    types = schema["type"]
    return types if isinstance(types, list) else [types]


def _allowed_types(schema: object, root: object, seen: frozenset[str] = frozenset()) -> list[object]:
    """The types of what `schema` allows, or more. A stated `type` is believed, since the schema itself is checked.

    `seen` are the references on the way here: a schema that refers to itself may allow anything.
    """
    if isinstance(schema, dict) and "type" in schema:
        return _stated_types(schema)
    deciding = _deciding(_dict(schema))
    if deciding is None:
        return next(([_IMPLY_TYPE[keyword]] for keyword in _IMPLY_TYPE if keyword in _dict(schema)), _ANY)
    value = _dict(schema)[deciding]
    if deciding == "$ref":
        return _ANY if value in seen else _allowed_types(_target(str(value), root), root, seen | {str(value)})
    members = [value] if deciding == "const" else value
    if not isinstance(members, list):
        return _ANY
    if deciding in ("const", "enum"):
        return ["integer" if isinstance(v, float) and v.is_integer() else _TYPES[type(v)] for v in members]
    return [name for member in members for name in _allowed_types(member, root, seen)]


def _leads_to_itself(schema: object, root: object, seen: frozenset[str] = frozenset()) -> bool:
    """Whether references lead round in a circle, with no other way out. `seen` are those on the way here."""
    schema = _dict(schema)
    deciding = _deciding(schema)
    if deciding == "$ref":
        ref = str(schema["$ref"])
        return ref in seen or _leads_to_itself(_target(ref, root), root, seen | {ref})
    members = schema[deciding] if deciding in LISTS_OF_SCHEMAS else []
    return (
        isinstance(members, list) and bool(members) and all(_leads_to_itself(m, root, seen) for m in members)
    )


def _deciding(schema: Schema) -> str | None:
    return next((keyword for keyword in _ENFORCED_ALONE if keyword in schema), None)


def _target(ref: str, root: object) -> object:
    """The schema that `ref` names; None where there is none. XGrammar finds no members of lists either."""
    for key in ref.split("/")[1:]:
        root = _dict(root).get(key)
    return root


def _dict(value: object) -> Schema:
    return value if isinstance(value, dict) else {}


def _ignored_beside(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield the keywords that are ignored beside another one of the same type."""
    has_format = schema.get("format") in _FORMATS
    if has_format and "pattern" in schema:
        yield "pattern", " beside 'format'"
    spelled = "format" if has_format else "pattern"
    if spelled in schema:
        is_kept = has_format and schema["format"] not in _MAY_BE_EMPTY and schema.get("minLength", 2) < 2
        beside = [
            keyword for keyword in _LENGTHS if keyword in schema and not (is_kept and keyword == "minLength")
        ]
        yield from ((keyword, f" beside {spelled!r}") for keyword in beside)
    for least, most in zip(_COUNTS[::2], _COUNTS[1::2], strict=True):
        if schema.get(least, 0) > schema.get(most, math.inf):
            yield least, f" above {most!r}"
    yield from _ignored_of_numbers(schema)
    names, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if len(patterns) > 1 or (patterns and names):
        yield "patternProperties", " beside 'properties' or another pattern, since both may apply to a name"
    for keyword in ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"):
        is_ignored = schema.get(keyword) is False if keyword in _OPEN[:2] else keyword in schema
        if "propertyNames" in schema and is_ignored:
            yield "propertyNames", f" beside {keyword!r}"
    if any(name not in names for name in schema.get("required", [])):
        yield "required", " for names that are not in 'properties'"
    num_required = len(set(schema.get("required", [])))
    if schema.get("maxProperties", math.inf) < num_required:
        yield "maxProperties", " below the number of required names"
    is_open = any(schema.get(keyword, False) is not False for keyword in _OPEN)
    if is_open and schema.get("minProperties", 0) > 1:
        yield "minProperties", " above 1 where names are free, since a name may be written twice"
    if not is_open and schema.get("minProperties", 0) > len(names):
        yield "minProperties", " above the number of names in 'properties'"
    if is_open and any(json.dumps(name) != f'"{name}"' for name in names):
        yield "properties", " with a name outside ASCII or with an escape, where other names are free"
    num_first = len(schema.get("prefixItems", []))
    if schema.get("maxItems", math.inf) < num_first:
        yield "maxItems", " below the number of 'prefixItems'"
    others = schema.get("items", schema.get("unevaluatedItems", False))
    if others is False and schema.get("minItems", 0) > num_first:
        yield "minItems", " above the number of 'prefixItems' without 'items'"


def _ignored_of_numbers(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield what numbers do not keep to. XGrammar writes those with a bound with at most six decimals."""
    types = _stated_types(schema) if "type" in schema else []
    if "multipleOf" in schema and "number" in types:
        yield "multipleOf", " but for integers"
    given = {keyword: Fraction(str(schema[keyword])) for keyword in _RANGE if keyword in schema}
    yield from (("multipleOf", f" beside {keyword!r}") for keyword in given if "multipleOf" in schema)
    if "integer" in types:
        yield from (
            (keyword, " of integers unless it is one") for keyword, bound in given.items() if bound % 1
        )
    for keyword, bound in given.items() if "number" in types else ():
        if bound % 1 == 0 and bound != Fraction(float(bound)):
            yield keyword, " of numbers, since no 64-bit float is this integer"
        if keyword.startswith("exclusive") and abs(bound) > MAX_EXCLUSIVE:
            yield keyword, f" of numbers above {MAX_EXCLUSIVE} in magnitude, where six decimals are not exact"
    scale = 10**6 if "number" in types else 1
    lowest = max(
        math.ceil(given.get("minimum", -_FAR) * scale),
        math.floor(given.get("exclusiveMinimum", -_FAR) * scale) + 1,
    )
    highest = min(
        math.floor(given.get("maximum", _FAR) * scale),
        math.ceil(given.get("exclusiveMaximum", _FAR) * scale) - 1,
    )
    if given and lowest > highest:
        yield next(iter(given)), ": no number of at most six decimals is within the bounds"
