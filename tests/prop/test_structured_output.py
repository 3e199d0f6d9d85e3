"""Random schemas and regexes, compiled as on a node: random logits under the masks give only what was asked for.

A complete answer is checked by `jsonschema`, `re` and `regex`. A schema or a regex that cannot be enforced is a 400
that names the keyword and its path. STRUCTURED_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
import regex as regex_module
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.errors import RequestError
from shared.grammar.backend import CompiledGrammar
from shared.grammar.xgrammar_backend import XGrammarBackend
from shared.protocol.sampling_params import Grammar
from tests.modelzoo import EOS_TOKEN_ID, write_tokenizer

VOCAB_SIZE = 400
MAX_STEPS = 120
NUM_ANSWERS = 4
NUM_EXAMPLES = int(os.environ.get("STRUCTURED_EXAMPLES", "40"))
ENDS = ('"', "}", "]", "0", "1", "a", ":", ",", " ")


class GrammarRig:
    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder, vocab_size=VOCAB_SIZE)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend = XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID,))
        self.ends = np.zeros(VOCAB_SIZE, dtype=bool)
        self.ends[[EOS_TOKEN_ID, *(self.tokenizer.token_to_id(text) for text in ENDS if text != " ")]] = True


@dataclass
class Seen:
    """What was seen in the examples of a test, which might pass else with everything refused."""

    num_compiled: int = 0
    num_answers: int = 0

    def assert_enough(self) -> None:
        assert self.num_compiled >= NUM_EXAMPLES // 10
        assert self.num_answers >= NUM_EXAMPLES // 10


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> GrammarRig:
    return GrammarRig(tmp_path_factory.mktemp("tokenizer"))


def compile_or_refuse(world: GrammarRig, grammar: Grammar, message: str) -> CompiledGrammar | None:
    """None if the node refuses the grammar, which has to be a 400 with such a message."""
    refused = None
    try:
        return world.backend.compile(grammar)
    except RequestError as error:
        refused = error
    assert (refused.status, refused.param) == (400, grammar.kind)
    assert re.match(message, refused.message), refused.message
    return None


def answers(world: GrammarRig, compiled: CompiledGrammar | None, seed: int) -> Iterator[str]:
    """The complete answers of a few random walks. Half of the steps prefer tokens that lead to an end."""
    choices = random.Random(seed)
    mask_1W = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    for _ in range(NUM_ANSWERS if compiled else 0):
        state, ids = compiled.new_matcher(), list[int]()
        while not state.is_terminated and len(ids) < MAX_STEPS:
            mask_1W.fill(0)
            state.fill_mask(mask_1W, 0)
            allowed = np.unpackbits(mask_1W.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool)
            short = allowed & world.ends
            [found] = np.nonzero(short if short.any() and choices.random() < 0.5 else allowed)
            assert found.size, f"a dead end behind {world.tokenizer.decode(ids)!r}"
            ids.append(int(choices.choice(found.tolist())))
            assert state.accept(ids[-1]), f"the mask allowed {ids[-1]} behind {ids[:-1]}"
        if state.is_terminated:
            yield world.tokenizer.decode(ids[:-1])


# --- regexes

LITERALS = st.sampled_from(
    [*"ab3 _,é;-\"'#&~/<", r"\.", r"\^", r"\\", r"\]", r"\-", r"\/", r"\t", r"\x41", r"\xe9", r"\u00e9", r"\u4e00"]
)  # fmt: skip
SETS = st.sampled_from([".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"])
MEMBERS = st.one_of(
    LITERALS,
    st.sampled_from(
        ["a-c", "0-9", " -~", r"\d", r"\W", r"\s", r"\S", r"\n", r"\b", "b^", "$", ".", "[", "!-#"]
    ),
)
CLASSES = st.one_of(
    st.lists(MEMBERS, min_size=1, max_size=3).map(lambda members: f"[{''.join(members)}]"),
    st.lists(
        st.one_of(LITERALS, st.sampled_from(["a-c", r"\d", r"\w", r"\s", r"\n"])), min_size=1, max_size=3
    ).map(
        lambda members: f"[^{''.join(members)}]"  # never empty
    ),
    st.sampled_from(
        [r"[^\S]", r"[^\W]", r"[^\D]", r"[\x5ea]", r"[a\x2dc]", r"[\u005e]", "[^^]", "[[:alpha:]]"]
    ),
)
REPEATS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{0}", "{1,2}", "{1,}", "+?", "??"])
ODD = st.sampled_from(
    ["^", "$", r"\A", r"\Z", r"\b", r"\z", r"\Q", "(?=a)", "(?!a)", "(?<=a)", "(?i)", "(?i:a)", r"\1", "++", "{2}+"]
    + [r"\p{L}", r"[\p{L}]", r"\x{41}", "{", "{,2}", "[]", "[^]", "*", "{99999999999}", "(?P<n>a)", "(?<n>a)", r"\a"]
)  # fmt: skip


def sequences(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A few of `items` behind each other, and now and then something odd between them."""
    item = st.integers(0, 30).flatmap(lambda number: ODD if number == 17 else items)
    return st.lists(item, min_size=1, max_size=3).map("".join)


REPEATED = st.tuples(st.one_of(LITERALS, SETS, CLASSES), REPEATS).map("".join)
REGEXES = st.recursive(
    sequences(REPEATED),
    lambda inner: st.one_of(
        sequences(inner),
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        st.tuples(st.sampled_from(["(", "(?:"]), inner, st.just(")"), REPEATS).map("".join),
        inner.map(lambda text: f"^{text}$"),
    ),
    max_leaves=4,
)


def is_match(pattern: str, text: str) -> bool:
    """Whether both judges, as far as they know the syntax, say that the pattern matches the whole text."""
    pattern = re.sub(r"\(\?P?<n>", "(?:", pattern)  # `re` has only one of these, and takes a name once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets within sets, which have no meaning here
        judged = [regex_module.fullmatch(pattern, text, regex_module.ASCII | regex_module.VERSION0)]
        judged.append(re.fullmatch(pattern, text, re.ASCII))
    return None not in judged


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_an_answer_matches_the_regex(world: GrammarRig, kind: Literal["regex", "json_schema"]) -> None:
    seen = Seen()

    @given(pattern=REGEXES, seed=st.integers(0, 2**32))
    @example(pattern=".+", seed=3)  # XGrammar 0.2.9 lets a stop token end it, since the token's text matches
    @settings(max_examples=NUM_EXAMPLES)
    def check(pattern: str, seed: int) -> None:
        schema = json.dumps({"type": "string", "pattern": pattern})
        grammar = Grammar(kind, pattern if kind == "regex" else schema)
        compiled = compile_or_refuse(world, grammar, rf"{kind}: ")
        seen.num_compiled += compiled is not None
        for answer in answers(world, compiled, seed):
            seen.num_answers += 1
            text = answer if kind == "regex" else json.loads(answer)
            assert is_match(pattern, text), text

    check()
    seen.assert_enough()


# --- classes in patterns

IN_A_SCHEMA = [
    ('"', lambda pattern: {"type": "string", "pattern": pattern}),
    ('{"', lambda pattern: {"type": "object", "propertyNames": {"pattern": pattern}, "minProperties": 1}),
    ('{"', lambda pattern: {"type": "object", "patternProperties": {pattern: True}, "minProperties": 1}),
]


@pytest.mark.parametrize(
    ("opening", "schema"), IN_A_SCHEMA, ids=["pattern", "propertyNames", "patternProperties"]
)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("é", ""), ("", "一?")])
@pytest.mark.parametrize(
    "pattern",
    [
        ".",
        r"\W",
        r"\S",
        r"\s",
        "[^é]",
        "[^一-龥]",
        "[ -~é]",
        r"[^\x00-\x1f\x7f]",
        "[^a-]",
    ]
    + [r"[\d\xe9]", r'["\\a]', r"[\n-b]", r"[^\W\d]", r"[\u4e00-]", r"[~-é]", r"[\^-z]"],
)
def test_a_class_in_a_pattern_keeps_to_json(
    world: GrammarRig, opening: str, schema: Callable[[str], object], before: str, pattern: str, after: str
) -> None:
    compiled = world.backend.compile(Grammar("json_schema", json.dumps(schema(f"{before}{pattern}{after}"))))

    def takes(text: str) -> bool:
        state = compiled.new_matcher()
        ids = [token_id for char in text for token_id in world.tokenizer.encode(char).ids]
        return all(map(state.accept, ids))

    opening += before
    assert takes(opening)
    assert not takes(f'{opening}""')
    allowed = re.compile(pattern, re.ASCII)
    for char in "\\\n\r\t\x00":
        assert not takes(opening + char)
    for char in "abz09 ~!#é一þ_-A^\x7f":
        assert takes(f'{opening}{char}"') == bool(allowed.fullmatch(char)), char


REPEATED_IN_JSON = [  # in each an engine that shares states between a repetition and what is around it goes wrong
    "(ab+)?",
    "(ab*)?b",
    "a|a{1,2}",
    "a(-b+)?",
    "(?:a(?:b{2,3}))?",
    "(?:(?:ba+|b))?",
    "a|ab{0,1}",
    "(a+?b?)*",
    "(a*b)?",
    "(a+b)??",
    "([ab]*-)?a",
]


@pytest.mark.parametrize("pattern", REPEATED_IN_JSON)
def test_a_repetition_in_a_pattern_is_entered_and_left_at_its_ends(world: GrammarRig, pattern: str) -> None:
    compiled = world.backend.compile(
        Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    )
    for text in ("".join(letters) for size in range(5) for letters in itertools.product("ab-", repeat=size)):
        state = compiled.new_matcher()
        ids = [token_id for char in f'"{text}"' for token_id in world.tokenizer.encode(char).ids]
        allowed = all(map(state.accept, [*ids, EOS_TOKEN_ID]))
        assert allowed == is_match(pattern, text), text


# --- schemas

NAMES = st.sampled_from(["a", "b", "ab", "é", 'q"', "$ref", "type", "const"])
COUNTS = st.one_of(
    st.integers(0, 3), st.sampled_from([0, 1, 2, 3, 3, 2, 1, 5, -1, 2**31, 2**32, 1.0, 1.5, "1", True])
)
BOUNDS = st.one_of(
    st.integers(-20, 20),
    st.sampled_from([-1.5, 0.1, 1e-7, 2e-7, 0.999999, 0.9999999, 3.14159265, 3.14159266, 99.99]),
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**25, 1e18, 1e300, "1", True]),
)
VALUES = st.one_of(
    st.sampled_from([None, True, 0, -1, 1.0, 0.1, 1.5e300, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**25]),
    st.sampled_from(["", "a", 'q"\\', "é\n", {"$ref": "#/a"}, {"a": [1, None]}, [2**64], [], {}]),
)  # fmt: skip
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
FORMATS += ["regex", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer", "binary", "x"]
ANNOTATIONS: dict[str, st.SearchStrategy[Any]] = {
    "title": st.just("T"),
    "description": st.just("D"),
    "default": VALUES,
    "examples": st.lists(VALUES, max_size=1),
}
TYPES = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"]),
    st.lists(st.sampled_from(["string", "integer", "number", "null", "object", "array"]), max_size=2, unique=True),
    st.sampled_from(["string", "integer", "any", None]),
)  # fmt: skip
KEYWORDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNTS
    ),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUNDS),
    "multipleOf": st.sampled_from([2, 3, 7.0, 0.5, 0, -1, 1000, 1025, 2**40]),
    "pattern": REGEXES,
    "format": st.sampled_from(FORMATS),
    "const": VALUES,
    "enum": st.lists(VALUES, max_size=3),
    "required": st.lists(NAMES, max_size=2),
}
OF_TYPE = {
    "string": ["minLength", "maxLength", "pattern", "format"],
    "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
}
UNKNOWN = ["not", "if", "contains", "dependentRequired", "minlength", "nullable", "x-note", "$id"]
UNKNOWN += ["additionalItems"]


@st.composite
def leaves(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly keywords that belong to the type, sometimes any."""
    schema: dict[str, Any] = {}
    kind = draw(st.sampled_from(["string", "integer", "number", "value", "any"]))
    names = OF_TYPE.get(kind, ["const", "enum"] if kind == "value" else sorted(KEYWORDS))
    if kind in OF_TYPE:
        schema["type"] = draw(st.sampled_from([kind, [kind, "null"]]))
    elif kind == "any" and draw(st.booleans()):
        schema["type"] = draw(TYPES)
    for name in draw(st.lists(st.sampled_from(names), max_size=2, unique=True)):
        schema[name] = draw(KEYWORDS[name])
    for name in draw(st.lists(st.sampled_from(sorted(ANNOTATIONS)), max_size=1)):
        schema[name] = draw(ANNOTATIONS[name])
    if draw(st.integers(0, 40)) == 17:
        schema[draw(st.sampled_from(UNKNOWN))] = draw(VALUES)
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties and draw(st.booleans()):
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    if draw(st.integers(0, 3)) == 0:
        del schema["properties"]
    for name, strategy in {
        "additionalProperties": st.one_of(st.booleans(), inner),
        "unevaluatedProperties": st.one_of(st.booleans(), inner),
        "patternProperties": st.dictionaries(REGEXES, inner, max_size=2),
        "propertyNames": leaves().map(
            lambda names: {**names, "type": "string"} if "const" not in names else names
        ),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
        "required": st.lists(NAMES, max_size=2),
    }.items():
        if draw(st.integers(0, 12)) == 7:
            schema[name] = draw(strategy)
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": draw(inner)}
    for name, strategy in {
        "prefixItems": st.lists(inner, max_size=2),
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "unevaluatedItems": st.one_of(st.booleans(), inner),
        "uniqueItems": st.booleans(),
        "items": st.one_of(st.booleans(), st.lists(inner, max_size=1)),
    }.items():
        if draw(st.integers(0, 6)) == 3:
            schema[name] = draw(strategy)
    return schema


@st.composite
def choices_of(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    keyword = draw(st.sampled_from(["anyOf", "anyOf", "anyOf", "allOf", "oneOf"]))
    schema: dict[str, Any] = {
        keyword: draw(st.lists(inner, min_size=draw(st.sampled_from([1, 1, 1, 1, 0])), max_size=2))
    }
    if draw(st.integers(0, 6)) == 3:
        schema["type"] = draw(TYPES)
    return schema


REFERENCES = st.sampled_from(
    ["#/$defs/x", "#/$defs/y", "#/$defs/y", "#/$defs/no", "#/$defs/x/items", "http://x/", "#x"]
)
SUBSCHEMAS = st.recursive(
    st.one_of(leaves(), leaves(), st.booleans(), REFERENCES.map(lambda ref: {"$ref": ref})),
    lambda inner: st.one_of(objects(inner), arrays(inner), choices_of(inner)),
    max_leaves=4,
)
SCHEMAS = st.tuples(
    SUBSCHEMAS.filter(lambda schema: isinstance(schema, dict)), leaves(), objects(leaves())
).map(
    lambda parts: {
        **parts[0],
        **({"$defs": {"x": parts[1], "y": parts[2]}} if "$ref" in str(parts[0]) else {}),
    }
)


def whole_pattern(
    _: object, pattern: str, text: object, schema: object
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(text, str) and not is_match(pattern, text):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern!r}")


Judge = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        "pattern": whole_pattern,
        # oneOf is served as anyOf, as docs/http.md says
        "oneOf": jsonschema.Draft202012Validator.VALIDATORS["anyOf"],
    },
)


def test_an_answer_follows_the_schema(world: GrammarRig) -> None:
    seen = Seen()

    @given(schema=SCHEMAS, seed=st.integers(0, 2**32))
    @settings(max_examples=NUM_EXAMPLES)
    def check(schema: dict[str, Any], seed: int) -> None:
        grammar = Grammar("json_schema", json.dumps(schema))
        message = r"json_schema: "
        compiled = compile_or_refuse(world, grammar, message)
        seen.num_compiled += compiled is not None
        for text in answers(world, compiled, seed):
            seen.num_answers += 1
            Judge(schema).validate(json.loads(text))

    check()
    seen.assert_enough()


COMMON: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    (
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": ["boolean", "null"]},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        st.fixed_dictionaries({"a": st.integers(0, 99), "b": st.sampled_from([True, False, None])}),
    ),
    (
        {"type": "array", "items": {"type": "string", "pattern": r"^[\w.]{0,2}-?\d*$"}, "maxItems": 2},
        st.lists(st.from_regex(re.compile(r"[\w.]{0,2}-?\d*", re.ASCII), fullmatch=True), max_size=2),
    ),
    (
        {"anyOf": [{"type": "integer", "multipleOf": 3}, {"enum": ["a", None, "é"]}, {"type": "string"}]},
        st.one_of(st.integers(-99, 99).map(lambda number: 3 * number), st.none(), st.text()),
    ),
    (
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "additionalProperties": {"type": "number"}}}},
        st.dictionaries(
            st.text(), st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
        ),
    ),
]


@pytest.mark.parametrize(("schema", "values"), COMMON, ids=["object", "pattern", "choice", "free"])
@given(data=st.data())
@settings(max_examples=NUM_EXAMPLES // 2)
def test_what_a_common_schema_allows_may_be_said(
    world: GrammarRig, schema: dict[str, Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    """So that nothing is enforced by forbidding too much."""
    text = json.dumps(data.draw(values), separators=(",", ":"), sort_keys=True)
    assume("<|" not in text)  # the name of a special token, which no grammar allows
    state = world.backend.compile(Grammar("json_schema", json.dumps(schema))).new_matcher()
    assert all(map(state.accept, [*world.tokenizer.encode(text).ids, EOS_TOKEN_ID])), text
