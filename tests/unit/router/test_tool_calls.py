"""Reading a forced call out of an answer's text, however that is cut into pieces; and the schemas that force it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from router.api.tool_calls import ForcedCall
from shared.errors import RequestError
from shared.grammar.schema_keywords import check_keywords
from tests.unit.router.fakes import EOS, byte_level_tokenizer

ARGUMENTS = st.dictionaries(
    st.text(max_size=3),
    st.one_of(st.integers(), st.text(), st.just({}), st.just({"}": ["{", "}"]})),
    max_size=3,
)
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


FORCED = ForcedCall(name=None, grammar=None, finish_reason="tool_calls")


def read(pieces: list[str], call: ForcedCall = FORCED) -> tuple[str | None, str]:
    """The name and the arguments of the call that comes in these pieces."""
    reader = call.reader()
    told = [
        more
        for at, piece in enumerate(pieces, 1)
        for more in reader.feed([piece], "" if at == len(pieces) else None).calls
    ]
    assert [more.name for more in told[1:]] == [None] * len(told[1:])
    return (told[0].name if told else None), "".join(more.arguments for more in told)


@given(
    name=st.text(min_size=1, max_size=5),
    arguments=ARGUMENTS,
    cuts=st.lists(st.integers(0, 500)),
    space=st.sampled_from(["", " ", "\n  "]),
)
def test_a_call_is_the_same_for_any_split(
    name: str, arguments: dict[str, Any], cuts: list[int], space: str
) -> None:
    inner = json.dumps(arguments, ensure_ascii=False)
    text = f'{{{space}"name":{space}{json.dumps(name)},{space}"arguments":{space}{inner}{space}}}{space}'
    told = read(pieces_of(text, cuts))
    assert told == (name, inner) == read([text])


@given(cut=st.integers(0, 46), at=st.integers(0, 46))
def test_a_call_that_is_cut_off_keeps_all_that_was_said_of_the_arguments(cut: int, at: int) -> None:
    whole = '{"name": "f", "arguments": {"a": {"b": "}"}, '
    text = whole[:cut]
    name, told = read([text[:at], text[at:]])
    assert told == text[whole.index(' {"a"') + 1 :]
    assert name == ("f" if told else None)


def test_a_named_function_needs_no_envelope() -> None:
    call = ForcedCall.named("f", CITY, "tools[0].function.parameters")
    assert call.grammar is not None
    assert json.loads(call.grammar.grammar.text) == CITY
    assert call.grammar.field == "tools[0].function.parameters"
    assert read(['{"city"', ": 1}"], call) == ("f", '{"city": 1}')


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "weather", "arguments": {"city": {"name": "Zürich"}}}', True),
        ('{"name": "now", "arguments": {}}', True),
        ('{"name": "now", "arguments": {"city": {"name": "Zürich"}}}', False),
        ('{"name": "weather", "arguments": {"city": "Zürich"}}', False),
        ('{"name": "later", "arguments": {}}', False),
        ('{"arguments": {}, "name": "now"}', False),
        ('{"name": "now", "arguments": {}, "more": 1}', False),
    ],
)
def test_one_grammar_for_several_functions(text: str, fits: bool) -> None:
    call = ForcedCall.any_of({"weather": CITY, "now": None}, "tools")
    assert call.grammar is not None
    assert follows(call, text) == fits


def follows(call: ForcedCall, text: str) -> bool:
    """Whether a node would let the text through. Raises the node's RequestError."""
    assert call.grammar is not None
    tokenizer = byte_level_tokenizer()
    vocabulary = xgrammar.TokenizerInfo(
        [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())],
        xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=[tokenizer.token_to_id(EOS)],
    )
    schema = check_keywords(call.grammar.grammar.text)
    compiled = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(schema)
    return bool(xgrammar.GrammarMatcher(compiled).accept_string(text))


CALLS = [
    lambda parameters: ForcedCall.named("f", parameters, "tools[0].function.parameters"),
    lambda parameters: ForcedCall.any_of({"f": parameters}, "tools"),
]


@pytest.mark.parametrize("call_of", CALLS, ids=["named", "required"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"title": "x"},
        {"type": ["object", "null"]},
        {"type": ["null", "object"], "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        {"properties": {"a": {"type": "integer"}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
        {"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "object", "additionalProperties": True}}},
        {"enum": [{"a": 1}, {}]},
    ],
    ids=str,
)
def test_arguments_are_an_object_wherever_parameters_allow_one(
    call_of: Callable[[Any], ForcedCall], parameters: dict[str, Any]
) -> None:
    call = call_of(parameters)
    envelope = "{}" if call.name is not None else '{{"name": "f", "arguments": {}}}'
    assert follows(call, envelope.format("{}"))
    for arguments in ("null", "1", '"a"', "[]", "[{}]"):
        assert not follows(call, envelope.format(arguments))


@pytest.mark.parametrize("call_of", CALLS, ids=["named", "required"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "string"},
        {"type": ["string", "null"]},
        {"type": []},
        {"enum": [1]},
        {"const": "a"},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}},
    ],
    ids=str,
)
def test_parameters_that_are_not_of_objects_are_refused(
    call_of: Callable[[Any], ForcedCall], parameters: dict[str, Any]
) -> None:
    with pytest.raises(
        RequestError, match=r"tools\[0\]\.function\.parameters\.type must be|'type' at #"
    ) as refused:
        follows(call_of(parameters), "{}")
    assert refused.value.status == 400


REF = {"$ref": "#/$defs/x"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": REF}, "[1]", '["a"]'),
        ({"type": "array", "unevaluatedItems": REF}, "[1]", '["a"]'),
        ({"type": "array", "prefixItems": [REF]}, "[1]", '["a"]'),
        ({"type": "object", "additionalProperties": REF}, '{"a": 1}', '{"a": "a"}'),
        ({"type": "object", "unevaluatedProperties": REF}, '{"a": 1}', '{"a": "a"}'),
        ({"type": "object", "patternProperties": {"^a$": REF}}, '{"a": 1}', '{"a": "a"}'),
        ({"oneOf": [REF]}, "1", '"a"'),
    ],
    ids=str,
)
def test_a_reference_leads_to_its_schema_from_everywhere(schema: dict[str, Any], good: str, bad: str) -> None:
    parameters = {"properties": {"k": schema}, "required": ["k"], "$defs": {"x": {"type": "integer"}}}
    call = ForcedCall.any_of({"f": parameters}, "tools")
    text = '{{"name": "f", "arguments": {{"k": {}}}}}'
    assert follows(call, text.format(good))
    assert not follows(call, text.format(bad))


def test_what_only_looks_like_a_reference_stays() -> None:
    """Values and annotations are no schemas; names of properties are no keywords."""
    parameters = {
        "type": "object",
        "properties": {
            "a": {"const": {"$ref": "#/a"}, "default": {"$ref": "#/a"}},
            "const": {"$ref": "#/$defs/x"},
            "$ref": {"enum": [{"$ref": "#/b"}]},
        },
        "required": ["a", "const", "$ref"],
        "$defs": {"x": {"type": "integer"}},
    }
    call = ForcedCall.any_of({"f": parameters}, "tools")
    arguments = '{"a":{"$ref":"#/a"},"const":1,"$ref":{"$ref":"#/b"}}'
    assert follows(call, f'{{"name": "f", "arguments": {arguments}}}')


@pytest.mark.parametrize("call_of", CALLS, ids=["named", "required"])
def test_references_of_names_are_followed_and_a_base_is_left(call_of: Callable[[Any], ForcedCall]) -> None:
    parameters = {
        "$id": "https://example.org/colors",
        "id": "colors",
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Color"},
        "additionalProperties": {"$ref": "#/$defs/Share"},
        "$defs": {"Color": {"type": "string", "enum": ["red", "blue"]}, "Share": {"type": "integer"}},
    }
    call = call_of(parameters)
    envelope = "{}" if call.name is not None else '{{"name": "f", "arguments": {}}}'
    assert follows(call, envelope.format('{"blue": 1}'))
    assert not follows(call, envelope.format('{"green": 1}'))
    assert not follows(call, envelope.format('{"red": "x"}'))
