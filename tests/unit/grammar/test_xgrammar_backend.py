"""The backend on two real tokenizers: what it allows, what it refuses, and how it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shared.errors import RequestError
from shared.grammar.schema_keywords import MAX_SCHEMA_DEPTH
from shared.grammar.xgrammar_backend import MAX_WHITESPACE, XGrammarBackend
from shared.protocol.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from tests.modelzoo import EOS_TOKEN_ID, IM_END_ID, IM_START, IM_START_ID, write_tokenizer

VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, vocab_size=400)  # fewer than the model has
    return folder


@pytest.fixture(scope="module")
def backend(folder: Path) -> XGrammarBackend:
    return XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID, IM_END_ID))


@pytest.fixture(scope="module")
def encode(folder: Path) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


def allowed(matcher: object) -> set[int]:
    mask = np.zeros((2, VOCAB_SIZE // 32), dtype=np.int32)
    matcher.fill_mask(mask, 1)  # type: ignore[attr-defined]
    assert not mask[0].any()
    return {i for i in range(VOCAB_SIZE) if mask[1].view(np.uint32)[i // 32] >> (i % 32) & 1}


def accepts(backend: XGrammarBackend, grammar: Grammar, ids: list[int]) -> bool:
    matcher = backend.compile(grammar).new_matcher()
    return all(matcher.accept(i) for i in ids) and matcher.accept(EOS_TOKEN_ID)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", "[a-c]{2}x"), "abx", "abd"),
        (Grammar("ebnf", 'root ::= "yes" | "no"'), "no", "maybe"),
        (Grammar("json_schema", '{"type": "object"}'), '{"a": [1, {"b": null}]}', "[1]"),
        (Grammar("json_schema", '{"enum": ["é", 3]}'), '"é"', '"e"'),
        (Grammar("json_schema", '{"type": "integer"}'), "-12", "1.5"),
    ],
    ids=str,
)
def test_a_grammar_takes_what_it_says(
    backend: XGrammarBackend, encode: Callable[[str], list[int]], grammar: Grammar, good: str, bad: str
) -> None:
    assert accepts(backend, grammar, encode(good))
    assert not accepts(backend, grammar, encode(bad))


def test_only_the_ends_of_sequence_come_after_the_end(backend: XGrammarBackend) -> None:
    matcher = backend.compile(Grammar("regex", "")).new_matcher()
    assert allowed(matcher) == {EOS_TOKEN_ID, IM_END_ID}
    assert not matcher.is_terminated
    assert matcher.accept(IM_END_ID)
    assert matcher.is_terminated
    assert not matcher.accept(IM_END_ID)


def test_special_tokens_and_ids_without_a_token_are_no_text(backend: XGrammarBackend) -> None:
    """A string may hold their text, letter by letter, but not the token that the detokenizer leaves out."""
    matcher = backend.compile(Grammar("regex", ".*")).new_matcher()
    found = allowed(matcher)
    assert len(found) > 300
    assert IM_START_ID not in found
    assert max(found) < 400
    assert accepts(backend, Grammar("regex", "<.*"), [ord(c) - 33 + 3 for c in IM_START])


@pytest.mark.parametrize("control", ["\t", "\x00", "\x1f"])
@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 1}, {"type": "string"}],
    ids=str,
)
def test_json_has_no_control_characters(
    backend: XGrammarBackend, encode: Callable[[str], list[int]], schema: object, control: str
) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    assert accepts(backend, grammar, encode('"ab"'))
    assert not accepts(backend, grammar, encode(f'"a{control}"'))
    assert accepts(backend, Grammar("regex", r"a[\x00-\x1f]"), encode(f"a{control}"))


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "[^a]"), Grammar("json_schema", '{"type": "string", "pattern": "^.$"}')],
    ids=str,
)
@pytest.mark.parametrize(
    ("lead", "forbidden", "right"), [(0xE0, 0x9F, 0xA0), (0xED, 0xA0, 0x9F), (0xF0, 0x8F, 0x90)]
)
def test_no_bytes_that_are_not_utf_8(
    backend: XGrammarBackend, folder: Path, grammar: Grammar, lead: int, forbidden: int, right: int
) -> None:
    """Of a surrogate, or of a character in more bytes than it needs. Their text would be three characters U+FFFD."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    letters = bytes_to_unicode()
    token_of = {byte: tokenizer.token_to_id(letters[byte]) for byte in (lead, forbidden, right, ord('"'))}
    matcher = backend.compile(grammar).new_matcher()
    assert grammar.kind == "regex" or matcher.accept(token_of[ord('"')])
    assert matcher.accept(token_of[lead])
    assert not matcher.accept(token_of[ord('"')]), "a token that is refused changes nothing"
    found = allowed(matcher)
    assert token_of[forbidden] not in found
    assert token_of[right] in found


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (".", "a", "\n"),
        (r"\s", "\t", "\u00a0"),
        (r"[^\S]", " ", "\u00a0"),
        (r"[\S]", "\u00a0", "\n"),
        (r"\S", "é", " "),
        (r"[\s\S]", "\n", ""),
        (r"\x41b", "Ab", "\u041b"),
        (r"[\x41b]", "A", "\u041b"),
        (r"[\xe9a]", "é", "\u0e9a"),
        (r"[\u00e93]", "3", "\u0e93"),
        (r"[\x7f3]", "3", "\u07f3"),
        (r"[^\x01a]", "b", "a"),
        (r"[\x00b]", "b", "c"),
        (r"[\u4e00-\u9fa5a]", "a", "b"),
        (r"[\xc0-\xffa]", "é", "b"),
        ("(?P<a>x)(?:y)", "xy", "x"),
        (r"[\^a]", "^", "b"),
        (r"[\^-z]", "^", "A"),
        (r"[\x5e]", "^", "a"),
        (r"[^\^a]", "b", "^"),
        (r"\Aab\Z", "ab", "AabZ"),
        ("^a|(?:b$)", "b", "ab"),
        ("(^a|b)c", "ac", "a"),
        ("a{,2}", "aa", "aaa"),
        ("(|a)b", "b", "a"),
    ],
)
def test_a_regex_means_what_it_means_to_re(
    backend: XGrammarBackend, encode: Callable[[str], list[int]], regex: str, good: str, bad: str
) -> None:
    assert accepts(backend, Grammar("regex", regex), encode(good))
    assert not accepts(backend, Grammar("regex", regex), encode(bad))


def test_a_mask_does_not_depend_on_what_was_compiled_before(folder: Path) -> None:
    """XGrammar's own cache gives the second of these the mask of the first."""
    backend = XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID,))
    empty = {"type": "object", "properties": {}}
    backend.compile(Grammar("json_schema", json.dumps({"anyOf": [{"type": "object"}, empty]})))
    compiled = backend.compile(
        Grammar("json_schema", json.dumps({"anyOf": [{"type": "array", "items": True}, empty]}))
    )
    assert all(compiled.new_matcher().accept(token_id) for token_id in allowed(compiled.new_matcher()))


def test_compiled_grammars_are_kept_up_to_a_size(folder: Path) -> None:
    backend = XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID,))
    first, second, third = (Grammar("regex", f"{letter}+") for letter in "abc")
    nbytes = backend.compile(first).nbytes
    backend = XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID,), 2 * nbytes + 5000)
    compiled = [backend.compile(grammar) for grammar in (first, second)]
    assert [backend.compile(second), backend.compile(first)] == compiled[::-1]
    backend.compile(third)
    assert backend.compile(first) is compiled[0]
    assert backend.compile(second) is not compiled[1]


def test_the_texts_of_kept_grammars_count(folder: Path) -> None:
    """A short grammar may have a long text: 64 KiB of spaces."""
    backend = XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID,))
    spaced = [Grammar("json_schema", '{"type": "null"}' + " " * (60_000 + at)) for at in range(8)]
    max_kept_nbytes = 3 * (backend.compile(spaced[0]).nbytes + 4 * 60_100 + 2048)
    backend = XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID,), max_kept_nbytes)
    compiled = [backend.compile(grammar) for grammar in spaced[:2]]
    assert [backend.compile(grammar) for grammar in spaced[:2] * 3] == compiled * 3
    for grammar in spaced[2:]:
        backend.compile(grammar)
    last = backend.compile(spaced[-2])
    assert backend.compile(spaced[-2]) is last
    assert backend.compile(spaced[-3]) is backend.compile(spaced[-3])
    assert backend.compile(spaced[1]) is not compiled[1]


def test_whitespace_is_bounded(backend: XGrammarBackend, encode: Callable[[str], list[int]]) -> None:
    grammar = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}')
    spaces = " " * MAX_WHITESPACE
    assert accepts(backend, grammar, encode(f"[{spaces}1]"))
    assert not accepts(backend, grammar, encode(f"[{spaces} 1]"))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"type": "thing"}', 'Unsupported type "thing"'),
        ("json_schema", '{"type": ', "Failed to parse JSON"),
        ("json_schema", r'{"const": "\ud83d"}', "Failed to parse JSON"),
        ("json_schema", "[]", "Schema should be an object or bool"),
        ("json_schema", '{"$ref": "#/$defs/nowhere"}', "Cannot find field"),
        (
            "json_schema",
            '{"items": {"type": "array", "contains": {}}}',
            "'contains' at #/items cannot be enforced",
        ),
        (
            "json_schema",
            '{"type": "string", "pattern": "(?!a)b"}',
            "'pattern' at # cannot be enforced: it has a lookaround",
        ),
        ("regex", "(a", "missing ), unterminated subpattern at position 0"),
        ("regex", "a(?=b)", "it has a lookaround"),
        ("regex", "(?i)a", "it has flags"),
        ("regex", "a^b", "it has an anchor that is not at an end"),
        ("regex", "(a$)b", "it has an anchor that is not at an end"),
        ("regex", r"ab\b", "it has an anchor that is not at an end"),
        ("regex", r"(a)\1", "it has a backreference"),
        ("regex", "a{2}+", "it has possessive_repeat"),
        ("regex", r"\p{L}", "bad escape \\p at position 0"),
        ("regex", "[[:alpha:]]", "it has [:alpha:]"),
        ("regex", "a{100000}", "it has 100000 repetitions, more than 99999"),
        ("regex", "a{99999999999}", "the repetition number is too large"),
        ("regex", r"[^\s\S]", "it has a class without a character"),
        ("regex", r"\ud800", "it has a class without a character"),
        ("regex", "(" * 20_000, "it has more than a few hundred levels of parentheses"),
        ("ebnf", "root ::= other", 'Rule "other" is not defined'),
        ("ebnf", 'start ::= "a"', "root rule"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_compilers_words(
    backend: XGrammarBackend, kind: str, text: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        backend.compile(Grammar(kind, text))  # type: ignore[arg-type]
    error = caught.value
    assert (error.status, error.param) == (400, kind)
    assert error.message.startswith(f"{kind}: ")
    assert message in error.message
    assert ".cc" not in error.message
    assert len(error.message) < 600


@pytest.mark.parametrize(
    "schema",
    ['{"$ref": "#"}', '{"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}'],
)
def test_a_schema_that_leads_to_nothing_but_itself_allows_no_token(
    backend: XGrammarBackend, schema: str
) -> None:
    assert allowed(backend.compile(Grammar("json_schema", schema)).new_matcher()) == set()


def test_a_schema_as_deep_as_allowed_compiles(backend: XGrammarBackend) -> None:
    levels = MAX_SCHEMA_DEPTH // 2
    schema = '{"type":"array","items":' * levels + "{}" + "}" * levels
    assert backend.compile(Grammar("json_schema", schema)).vocab_size == VOCAB_SIZE


_COMPILE = """
import json, sys
from shared.errors import RequestError
from shared.grammar.compile_pool import CompilePool
from shared.grammar.xgrammar_backend import XGrammarBackend
from shared.model.files import resolve_model
from shared.protocol.sampling_params import Grammar
pool = CompilePool(lambda: XGrammarBackend.load(resolve_model("builtin"), 4096, (0,)))
for kind, text in json.load(sys.stdin):
    try:
        pool.compile(Grammar(kind, text)).result(120)
    except RequestError as error:
        assert error.status == 400
print("alive")
"""


def test_the_stack_of_a_compiler_thread_holds_the_longest_text() -> None:
    """In a process of its own, which an overflow would end."""
    levels = MAX_GRAMMAR_CHARS // 2 - 30
    nested = "(" * levels + "a" + ")" * levels
    links = {f"{at}": {"properties": {"x": {"$ref": f"#/$defs/{at + 1}"}}} for at in range(1100)}
    texts = [
        ("regex", nested),
        ("ebnf", f'root ::= Regex("{nested}")'),
        ("ebnf", f"root ::= {'(' * levels}"),
        ("json_schema", json.dumps({"$ref": "#/$defs/0", "$defs": {**links, "1100": {"type": "null"}}})),
    ]
    assert max(len(text) for _, text in texts) <= MAX_GRAMMAR_CHARS
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        input=json.dumps(texts), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        XGrammarBackend.load(tmp_path, VOCAB_SIZE, (0,))
