"""How deep a grammar's text may nest, and that what is deeper never reaches the compiler's recursion."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

import pytest

from shared.errors import RequestError
from shared.grammar.nesting import MAX_REGEX_DEPTH, MAX_SCHEMA_DEPTH, check_nesting, regex_depth
from shared.protocol.sampling_params import MAX_GRAMMAR_CHARS, Grammar

Kind = Literal["json_schema", "regex", "ebnf"]


def nested(levels: int) -> str:
    return "(" * levels + "a" + ")" * levels


def schema(value: object) -> str:
    return json.dumps(value)


DEEP = nested(MAX_REGEX_DEPTH + 1)


@pytest.mark.parametrize(
    ("regex", "depth"),
    [
        ("", 0),
        ("(a)(b)(c)", 1),
        ("(a(b|(?:c))){2}", 3),
        (r"\(\(\(", 0),
        (r"[(((]", 0),
        (r"[\](((](a)", 1),
        (r"\[(a)", 1),
        ("[((", 0),
        (")))(((", 0),
    ],
)
def test_levels_of_a_regex(regex: str, depth: int) -> None:
    assert regex_depth(regex) == depth


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", DEEP),
        ("regex", "(a|" * (MAX_REGEX_DEPTH + 1)),
        ("json_schema", schema({"type": "string", "pattern": DEEP})),
        ("json_schema", schema({"items": [{"anyOf": [{"pattern": DEEP}]}]})),
        ("json_schema", schema({"patternProperties": {"a": True, DEEP: True}})),
        ("json_schema", schema({"propertyNames": {"pattern": DEEP}})),
        ("json_schema", f'{{"pattern": "{DEEP}", "pattern": "a"}}'),
        ("json_schema", schema({"pattern": DEEP}).replace("(", "\\u0028")),
        ("json_schema", f'{{"x": "\t", "pattern": "{DEEP}"}}'),
        ("json_schema", f'{{"minimum": {"9" * 5000}, "pattern": "{DEEP}"}}'),
        ("ebnf", f'root ::= Regex("{DEEP}")'),
        ("ebnf", f'root ::= "x" Regex # "y"\n ( "{DEEP}" )'),
        ("ebnf", f'root ::= Regex("{DEEP}")'.replace("((", "\\x28(")),
    ],
)
def test_a_deep_regex_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(RequestError, match=rf"{kind}: .*deeper than {MAX_REGEX_DEPTH} levels") as caught:
        check_nesting(Grammar(kind, text))
    assert (caught.value.status, caught.value.param) == (400, kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", nested(MAX_REGEX_DEPTH)),
        ("regex", r"\(" * 1000 + "[(]" * 1000 + "(a)" * 1000),
        ("json_schema", schema({"pattern": nested(MAX_REGEX_DEPTH), "enum": [DEEP], "const": {DEEP: DEEP}})),
        ("json_schema", schema({"properties": {"pattern": {"const": DEEP}}})),
        ("ebnf", f'root ::= Regex("{nested(MAX_REGEX_DEPTH)}") "{DEEP}"'),
        ("ebnf", f'root ::= "Regex(" "{DEEP}"'),
        ("ebnf", 'root ::= "(" | ' * 1000 + '"("'),
    ],
)
def test_what_is_no_deep_regex_is_let_through(kind: Kind, text: str) -> None:
    check_nesting(Grammar(kind, text))


@pytest.mark.parametrize(
    "text",
    [
        r'{"properties": {"\ud83d": {"not": {}}}}',
        r'{"$ref": "#/$defs/\ud83d"}',
        r'{"type": "object", "properties": {"\ud83d": 5}}',
        r'{"enum": [["\udE00\ud83d"]]}',
        r'{"x": 1, "x": {"\ud83d": 2}, "x": 3}',
    ],
)
def test_half_a_character_in_a_schema_is_refused(text: str) -> None:
    """No message about it could be encoded as UTF-8."""
    with pytest.raises(RequestError, match=r"json_schema: '\\ud\w{3}'") as caught:
        check_nesting(Grammar("json_schema", text))
    assert (caught.value.status, caught.value.param) == (400, "json_schema")
    check_nesting(Grammar("json_schema", r'{"enum": ["\ud83d\ude00", "\\ud83d"]}'))


@pytest.mark.parametrize("opening", ["[", '{"items":'])
def test_a_deep_schema_is_refused(opening: str) -> None:
    closing = {"[": "]", "{": "}"}[opening[0]]
    check_nesting(
        Grammar("json_schema", opening * (MAX_SCHEMA_DEPTH - 1) + "0" + closing * (MAX_SCHEMA_DEPTH - 1))
    )
    for levels in (MAX_SCHEMA_DEPTH, 5000):
        with pytest.raises(RequestError, match=f"deeper than {MAX_SCHEMA_DEPTH} levels"):
            check_nesting(Grammar("json_schema", opening * levels + "0" + closing * levels))


@pytest.mark.parametrize(
    "text",
    ["Regex(" + "#" * 60_000, "Regex " * 10_000, '"\\' * 30_000, "[" * 60_000, "Regex(#\n" * 8000],
    ids=len,
)
def test_reading_a_text_takes_no_backtracking(text: str) -> None:
    """Would not end in a lifetime if it did."""
    assert regex_depth(text) >= 0
    check_nesting(Grammar("ebnf", text))


_COMPILE_WITHOUT_LIMITS = """
import json, sys
import shared.grammar.xgrammar_backend as backend
from shared.errors import RequestError
from shared.grammar.compile_pool import CompilePool
from shared.model.files import resolve_model
from shared.protocol.sampling_params import Grammar
backend.check_nesting = lambda grammar: None
pool = CompilePool(lambda: backend.XGrammarBackend.load(resolve_model("builtin"), 4096, (0,)))
for kind, text in json.load(sys.stdin):
    try:
        pool.compile(Grammar(kind, text)).result(120)
    except RequestError as error:
        assert error.status == 400
print("alive")
"""


def test_the_stack_of_a_compiler_thread_holds_the_longest_text() -> None:
    """Even without the limits; so a text that they misread ends no process. In its own process, which would end."""
    levels = MAX_GRAMMAR_CHARS // 2 - 30
    links = {f"{i}": {"properties": {"x": {"$ref": f"#/{i + 1}"}}} for i in range(1300)}
    texts = [
        ("regex", nested(levels)),
        ("json_schema", schema({"type": "string", "pattern": nested(levels)})),
        ("ebnf", f'root ::= Regex("{nested(levels)}")'),
        ("ebnf", f"root ::= {'(' * levels}"),
        ("json_schema", schema({"$ref": "#/0", **links, "1300": {"type": "null"}})),
    ]
    assert max(len(text) for _, text in texts) <= MAX_GRAMMAR_CHARS
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE_WITHOUT_LIMITS],
        input=json.dumps(texts), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]
