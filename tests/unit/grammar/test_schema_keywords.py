# ruff: noqa: E501
"""What of a JSON schema is refused, since outputs would not be held to it; the rest is enforced by the library.

Each row of DROPPED is held against the library: once XGrammar enforces it, the test says that the rule can go.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import xgrammar

from shared.errors import RequestError
from shared.grammar.schema_keywords import MAX_SCHEMA_DEPTH, MAX_STATES, check_keywords

INT, STR = {"type": "integer"}, {"type": "string"}
OBJECT = {"type": "object", "properties": {"a": INT}, "required": ["a"]}

DROPPED: list[tuple[str, str, object, object]] = [
    # keyword, where, schema, and a value that the schema forbids and the library lets through
    ("not", "#", {"type": "string", "not": {"const": "a"}}, "a"),
    ("if", "#", {**OBJECT, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, {"a": 1}),
    ("uniqueItems", "#", {"type": "array", "items": INT, "uniqueItems": True}, [1, 1]),
    ("dependentRequired", "#", {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ("$ref", "#", {"$ref": "http://127.0.0.1:9/x"}, 1),
    ("$ref", "#", {"$ref": "#name", "$defs": {"x": {"$anchor": "name", **INT}}}, "a"),
    ("$dynamicRef", "#", {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", **INT}}}, "a"),
    ("minimum", "#", {"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": INT}}, 1),
    ("minimum", "#", {"enum": [1, 5], "minimum": 3}, 1),
    ("allOf", "#", {"allOf": [{"anyOf": [INT, STR]}, {"anyOf": [INT, {"type": "null"}]}]}, [1]),
    ("properties", "#", {**OBJECT, "allOf": [{"required": ["b"]}]}, {"x": 1}),
    ("required", "#/anyOf/0", {"anyOf": [{"required": ["b"]}, INT]}, "x"),
    ("oneOf", "#", {"anyOf": [INT], "oneOf": [STR]}, 1),
    ("enum", "#", {"const": "a", "enum": ["b"]}, "a"),
    ("type", "#", {"enum": [1, "a"], "type": "string"}, 1),
    ("type", "#", {"const": 1.5, "type": "integer"}, 1.5),
    ("type", "#", {"anyOf": [STR, INT], "type": "integer"}, "a"),
    ("type", "#", {"$ref": "#/$defs/x", "type": "string", "$defs": {"x": INT}}, 1),
    ("pattern", "#", {"type": "string", "pattern": "^(?!a)[ab]$"}, "a"),
    ("minimum", "#", {"minimum": 3}, 1),
    ("minLength", "#/$defs/x", {"$ref": "#/$defs/x", "$defs": {"x": {"minLength": 3}}}, "a"),
    ("pattern", "#/prefixItems/0", {"type": "array", "prefixItems": [{"pattern": "^a$"}]}, ["b"]),
    ("minItems", "#", {"minItems": 2}, [1]),
    ("patternProperties", "#", {"patternProperties": {"^a": INT}}, {"a": "x"}),
    ("maxLength", "#", {"type": "string", "pattern": "^a+$", "maxLength": 2}, "aaa"),
    ("minLength", "#", {"type": "string", "format": "date", "minLength": 20}, "2020-01-01"),
    ("minLength", "#", {"type": "string", "format": "hostname", "minLength": 2}, "a"),
    ("pattern", "#", {"type": "string", "format": "date", "pattern": "^2021.*$"}, "2020-01-01"),
    ("multipleOf", "#", {"type": "number", "multipleOf": 0.5}, 0.3),
    ("multipleOf", "#", {"type": ["number", "null"], "multipleOf": 2}, 3),
    ("multipleOf", "#", {"type": "integer", "multipleOf": 3, "minimum": 1}, 4),
    ("multipleOf", "#", {"type": "integer", "multipleOf": 1.5}, 4),
    ("multipleOf", "#", {"type": "integer", "multipleOf": 1025}, 4),
    ("minlength", "#", {"type": "string", "minlength": 2}, "a"),
    ("contains", "#/properties/a", {"type": "object", "properties": {"a": {"type": "array", "items": INT, "contains": {"const": 1}}}}, {"a": [2]}),
    ("maxLength", "#", {"type": "string", "maxLength": -1}, "a"),
    ("maxLength", "#", {"type": "string", "maxLength": 2**31}, "a"),
    ("type", "#", {"type": []}, 1),
    ("pattern", "#", {"type": "string", "pattern": "a^b"}, "ab"),
    ("pattern", "#", {"type": "string", "pattern": "a{2}+"}, "aaaa"),
    ("pattern", "#", {"type": "string", "pattern": "ab(?=c)"}, "ab"),
    ("patternProperties", "#", {"type": "object", "patternProperties": {"a$b": INT}}, {"ab": 1}),
    ("propertyNames", "#", {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": False}, {"a": 1}),
    ("properties", "#", {"type": "object", "properties": {"é": INT}, "additionalProperties": STR}, {"\u00e9": "x"}),
    ("propertyNames", "#", {"type": "object", "properties": {"b": {}}, "propertyNames": {"pattern": "^a$"}}, {"b": 1}),
    ("required", "#", {"type": "object", "propertyNames": {"pattern": "^a+$"}, "required": ["a"]}, {"aa": 1}),
    ("required", "#", {"type": "object", "additionalProperties": INT, "required": ["a"]}, {"b": 1}),
    ("required", "#", {**OBJECT, "required": ["a", "b"], "additionalProperties": False}, {"a": 1}),
    ("patternProperties", "#", {"type": "object", "properties": {"a": STR}, "patternProperties": {"^a$": INT}}, {"a": "x"}),
    ("patternProperties", "#", {"type": "object", "patternProperties": {"^a$": INT, "^a+$": STR}}, {"a": "x"}),
    ("type", "#", {"type": "integer", "anyOf": [{}]}, "a"),
    ("type", "#", {"type": "integer", "anyOf": [{"anyOf": [{"enum": ["a"]}]}]}, "a"),
    ("type", "#", {"type": "integer", "allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"anyOf": [INT, STR]}}}, "a"),
    ("allOf", "#", {"type": "integer", "allOf": []}, "a"),
    ("$ref", "#", {"$ref": "#/$defs", "$defs": {"not": INT}}, 1),
    ("$ref", "#", {"$ref": "#/$defs/", "$defs": {"": INT, "type": "string"}}, "a"),
    ("$ref", "#", {"$ref": "#/$defs//properties/x", "$defs": {"": {"properties": {"x": {"type": "null"}}}, "properties": {"x": INT}}}, 1),
    ("enum", "#", {"const": True, "enum": [1]}, True),
    ("$ref", "#/items", {"items": {"$ref": "#/$defs/x/propertyNames"}, "$defs": {"x": {"type": "object", "propertyNames": {"minLength": 3}}}}, ["a"]),
]  # fmt: skip

DROPPED_TEXTS: list[tuple[str, str, object, str]] = [
    # the same, with a value that only its text shows
    ("minimum", "#", {"type": "number", "minimum": 3.14159265, "maximum": 3.14159266}, ""),
    ("exclusiveMinimum", "#", {"type": "number", "exclusiveMinimum": 0.999999, "exclusiveMaximum": 1}, ""),
    ("anyOf", "#", {"anyOf": []}, ""),
    ("format", "#", {"type": "string", "format": "json-pointer"}, '"/\t"'),
    ("propertyNames", "#", {"type": "object", "propertyNames": {"type": ["string", "null"]}}, "{null: 1}"),
    ("pattern", "#", {"type": "string", "pattern": r"^[\x22]$"}, '"""'),
    ("minProperties", "#", {"type": "object", "additionalProperties": INT, "minProperties": 2}, '{"a": 1, "a": 2}'),
    ("pattern", "#", {"type": "string", "pattern": '^"$'}, '"""'),
    ("pattern", "#", {"type": "string", "pattern": r"^\\$"}, '"\\"'),
    ("pattern", "#", {"type": "string", "pattern": "^\t$"}, '"\t"'),
    ("pattern", "#", {"type": "string", "pattern": r"^[ab]\x22$"}, '"a""'),
    ("patternProperties", "#", {"type": "object", "patternProperties": {r"^\u0022$": INT}}, '{""": 1}'),
]  # fmt: skip

ENFORCED: list[tuple[object, object, object]] = [
    # schema, a value that it allows, and one that it forbids
    (OBJECT, {"a": 1}, {}),
    ({"type": "object", "properties": {"not": INT, "if": STR}, "required": ["not"]}, {"not": 1}, {"if": "x"}),
    ({"type": "object", "properties": {"kind": {"const": "not"}}}, {"kind": "not"}, {"kind": 1}),
    ({"const": "a", "enum": ["a"], "type": "string"}, "a", "b"),
    ({"enum": [1, None], "type": ["integer", "null"]}, None, 2),
    ({"anyOf": [INT, {"type": "null"}], "type": ["number", "null"]}, 1, "a"),
    ({"type": "object", "properties": {"a": STR, "b": {"$ref": "#/properties/a"}}, "required": ["b"]}, {"b": "x"}, {"b": 1}),
    ({"properties": {"a": INT}, "required": ["a"]}, {"a": 1}, {}),
    ({"$ref": "#/$defs/x", "description": "a number", "default": 3, "$defs": {"x": INT}}, 1, "a"),
    ({"type": "integer", "allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "integer", "minimum": 3}}}, 3, 1),
    ({"type": "object", "properties": {"a": {"anyOf": [INT, {"type": "null"}], "default": None}}}, {"a": None}, {"a": "x"}),
    ({"type": "object", "oneOf": [OBJECT, {"properties": {"b": STR}, "required": ["b"]}]}, {"b": "x"}, {"a": "x"}),
    ({"type": ["string", "integer"], "pattern": "^ab$", "minimum": 3}, "ab", 2),
    ({"type": "string", "format": "password", "minLength": 3}, "abc", "a"),
    ({"type": ["string", "null"], "format": "date"}, None, "x"),
    ({"type": "integer", "multipleOf": 3}, 9, 4),
    ({"type": "array", "items": INT, "minItems": 2, "uniqueItems": False}, [1, 1], [1]),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, {"a": 1}, {"bb": 1}),
    ({"type": "object", "patternProperties": {"^a+$": INT}, "minProperties": 1}, {"a": 1, "aa": 2}, {"a": "x"}),
    ({"type": "object", "additionalProperties": INT, "minProperties": 1}, {"a": 1}, {}),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 2}, {"a": 1, "b": 1}, {"b": 1}),
    ({"type": "object", "$ref": "#/$defs/x", "$defs": {"x": OBJECT}}, {"a": 1}, "a"),
    ({"type": "string", "pattern": r'^[^"]\d["a\t\\]?$'}, "a1", 'a1"'),
    ({"type": "string", "pattern": "^a|b$"}, "b", "ab"),
    ({"type": "string", "format": "uri", "minLength": 1}, "a:b", ""),
    ({"type": "string", "format": "date", "minLength": 0}, "2020-01-01", ""),
    ({"const": 2**63 - 1}, 2**63 - 1, 2**63),
    ({"enum": [-(2**63), 0.1]}, 0.1, 0.2),
    ({"const": {"$ref": "#/a", "not": 1}}, {"$ref": "#/a", "not": 1}, 1),
    ({"type": "number", "minimum": 3.141592, "maximum": 3.141593}, 3.141592, 3.1415),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-6}, 1e-6, 0),
    ({"type": "object", "properties": {"a": INT}, "required": ["a", "a"], "maxProperties": 1}, {"a": 1}, {}),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": True}, {"a": 1, "b": "x"}, {"a": "x"}),
    ({"type": "integer", "multipleOf": 1024}, 2048, 1025),
    ({"$schema": "x", "$id": "y", "$comment": "z", "x-note": 1, "deprecated": True, **INT}, 1, "a"),
    ({"type": "object", "additionalProperties": INT}, {"a": 1}, {"a": "x"}),
    ({"type": "object", "propertyNames": STR, "additionalProperties": INT}, {"a": 1}, {"a": "x"}),
    ({"type": "object", "propertyNames": {"enum": ["a", 'q"']}, "additionalProperties": INT}, {'q"': 1}, {"b": 1}),
    ({"propertyNames": {"$ref": "#/$defs/C"}, "additionalProperties": INT, "$defs": {"C": {"type": "string", "enum": ["r", "g"], "title": "C"}}}, {"g": 1}, {"b": 1}),
    ({"type": "object", "propertyNames": {"minLength": 2}, "unevaluatedProperties": INT}, {"aa": 1}, {"aa": "x"}),
    ({"type": "object", "propertyNames": {"pattern": r"^[\x61]+$"}, "additionalProperties": {"type": "string", "pattern": r"^[\x62é]$"}}, {"aa": "b"}, {"aa": "a"}),
    ({"type": "integer", "id": "i", "propertyOrdering": ["a"], "markdownDescription": "m", "errorMessage": {}, "externalDocs": {}}, 1, "a"),
    ({"type": "object", "properties": {"a": {"$id": "b", **INT}, "b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": "x"}),
    ({"type": "number", "exclusiveMinimum": 10**9}, 10**9 + 1, 10**9),
]  # fmt: skip


def follows(schema: object, text: str) -> bool:
    """Whether XGrammar itself lets the text through. Numbers in the text are written as XGrammar writes them."""
    pieces = [chr(at) for at in range(128)] + ["</s>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(pieces, stop_token_ids=[128]), max_threads=1)
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=2))
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(128))


def as_xgrammar_writes(value: object) -> str:
    """A value as JSON. XGrammar writes bounded numbers without exponents, and constants with 17 digits."""
    written = json.dumps(value, separators=(",", ":"))
    return {"1e-06": "0.000001", "0.1": "0.10000000000000001"}.get(written, written)


def ids(row: tuple[Any, ...]) -> list[str]:
    return [f"{at}-{each[0] if isinstance(each[0], str) else ''}" for at, each in enumerate(row)]


REFUSED = [*((*rule, json.dumps(forbidden)) for *rule, forbidden in DROPPED), *DROPPED_TEXTS]


@pytest.mark.parametrize(("keyword", "path", "schema", "forbidden"), REFUSED, ids=ids(tuple(REFUSED)))
def test_what_the_library_would_drop_is_refused_by_name(
    keyword: str, path: str, schema: object, forbidden: str
) -> None:
    with pytest.raises(RequestError) as refused:
        check_keywords(json.dumps(schema))
    assert refused.value.message.startswith(f"json_schema: {keyword!r} at {path} ")
    assert (refused.value.status, refused.value.param) == (400, "json_schema")
    assert follows(schema, forbidden), "the library enforces it: the rule can go"


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), ENFORCED)
def test_what_is_let_in_is_enforced(schema: object, allowed: object, forbidden: object) -> None:
    read = json.loads(check_keywords(json.dumps(schema)))
    assert follows(read, as_xgrammar_writes(allowed))
    assert not follows(read, json.dumps(forbidden))


def counted(num_names: int, **counts: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{at}": INT for at in range(num_names)}, **counts}


@pytest.mark.parametrize(
    "schema",
    [
        counted(65, minProperties=1),
        counted(200, maxProperties=100),
        {"anyOf": [counted(40, maxProperties=40)] * 9},
        {"anyOf": [{"type": "integer", "multipleOf": 1021}] * 9},
    ],
)
def test_a_schema_that_takes_minutes_to_compile_is_refused(schema: object) -> None:
    with pytest.raises(RequestError, match=f"states of the grammar, over {MAX_STATES}") as refused:
        check_keywords(json.dumps(schema))
    assert (refused.value.status, refused.value.param) == (400, "json_schema")


def test_no_schema_makes_room_for_states_of_others() -> None:
    schemas = {"a": {"type": "integer", "multipleOf": -(10**6)}, "b": counted(200, maxProperties=100)}
    with pytest.raises(RequestError, match="'multipleOf' at #/\\$defs/a"):
        check_keywords(json.dumps({"$ref": "#/$defs/b", "$defs": schemas}))


@pytest.mark.parametrize(
    "schema",
    [
        counted(63, minProperties=1),
        counted(500, minProperties=499),
        {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 10_000},
        {"anyOf": [{"type": "integer", "multipleOf": 1024}] * 4},
    ],
)
def test_a_schema_of_as_many_states_as_allowed_passes(schema: object) -> None:
    check_keywords(json.dumps(schema))


@pytest.mark.parametrize("digits", [str(2**63), str(-(2**63) - 1), "9" * 5000], ids=len)
@pytest.mark.parametrize(
    "schema", ['{"const": N}', '{"enum": [{"a": [N]}]}', '{"type": "integer", "minimum": N}']
)
def test_an_integer_beyond_64_bits_is_refused(schema: str, digits: str) -> None:
    """XGrammar writes 2**63 as 9.2233720368547758e+18."""
    with pytest.raises(RequestError, match=r"json_schema: .*(beyond 64 bits|4300 digits)"):
        check_keywords(schema.replace("N", digits))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"items":', "}")])
def test_a_schema_nests_so_deep_and_no_deeper(opening: str, closing: str) -> None:
    levels = MAX_SCHEMA_DEPTH - 1
    check_keywords(opening * levels + "0" + closing * levels)
    for levels in (MAX_SCHEMA_DEPTH, 5000):
        with pytest.raises(RequestError, match=f"deeper than {MAX_SCHEMA_DEPTH} levels"):
            check_keywords(opening * levels + "0" + closing * levels)


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "3",
        "[]",
        '{"type": 3, "multipleOf": "x", "format": ["date"], "required": 5, "propertyNames": 1}',
        '{"type": "object", "properties": [], "required": [[1]], "patternProperties": {"a": 1}, "anyOf": 3}',
        '{"type": "integer", "multipleOf": 1e999}',
        '{"type": "number", "minimum": 1e999, "maximum": NaN}',
        '{"type": [[]], "anyOf": [3, {"type": [{}]}]}',
        '{"type": "integer", "enum": 5}',
        '{"type": "object", "patternProperties": {}}',
    ],
)
def test_a_schema_of_no_sense_is_left_to_the_compiler_or_refused(text: str) -> None:
    with contextlib.suppress(RequestError):
        check_keywords(text)
