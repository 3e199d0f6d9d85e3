"""Grammars of answers that call tools, in the syntax of each family, and what the router reads of such answers."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers

from router.text.reply_parser import ReplyRegions, enforced_form, reply_formats
from shared.errors import RequestError
from shared.grammar.xgrammar_backend import XGrammarBackend, XGrammarMatcher
from shared.protocol.sampling_params import CallGrammar, Grammar

FAMILIES = {name: form.grammar for name, form in reply_formats().items() if form.grammar}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Zürich {}"]}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("get", "set")
]
EOS = 0
SPECIAL = (
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "</think>"),
)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> XGrammarBackend:
    """Of a tokenizer whose tokens are bytes, and some special tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS, **{letter: at for at, letter in enumerate(alphabet, 1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return XGrammarBackend.load(folder, tokenizer.get_vocab_size(), (EOS,))


def matcher(backend: XGrammarBackend, calls: CallGrammar) -> XGrammarMatcher:
    return backend.compile(Grammar("calls", msgspec.json.encode(calls).decode())).new_matcher()


def say(matcher: XGrammarMatcher, backend: XGrammarBackend, text: str) -> bool:
    """Whether the text may come, byte by byte and with its special tokens."""
    return all(matcher.accept(token_id) for token_id in backend._encode(text))


def write(matcher: XGrammarMatcher, backend: XGrammarBackend, seed: int) -> str:
    """A text that the grammar allows, which ends as soon as it may."""
    draw, size = random.Random(seed), len(backend._pieces)
    mask_1W = np.zeros((1, -(-size // 32)), dtype=np.int32)
    said = b""
    for _ in range(600):
        matcher.fill_mask(mask_1W, 0)
        allowed = np.flatnonzero(np.unpackbits(mask_1W.view(np.uint8), bitorder="little")[:size]).tolist()
        token_id = EOS if EOS in allowed else draw.choice(allowed)
        assert matcher.accept(token_id)
        if token_id == EOS:
            return said.decode()
        special = {at: text.encode() for at, text in backend._special_texts.items()}
        said += special.get(token_id) or backend._pieces[token_id]
    raise AssertionError(f"no end: {said!r}")


def read(family: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    form = reply_formats()[family]
    regions = ReplyRegions(form=form, has_calls=True, reasons=False, in_reasoning=False, tools=TOOLS)
    said, calls = regions.reader().feed([text], ""), list[list[str]]()
    for call in said.calls:
        if call.name is not None:
            calls.append([call.name, ""])
        calls[-1][1] += call.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_grammar_writes_is_read_as_one_call(backend: XGrammarBackend, family: str) -> None:
    calls = CallGrammar(family=FAMILIES[family], tools=TOOLS, parallel=False)
    for seed in range(12):
        text = write(matcher(backend, calls), backend, seed)
        ((name, arguments),) = read(family, text)
        assert name in ("get", "set")
        assert arguments.keys() == {"city", "n"}
        # In tags a grammar allows space around a value, which belongs to it.
        assert arguments["city"].strip() in ("Rome", "Zürich {}") and isinstance(arguments["n"], int)


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_are_all_that_is_written(backend: XGrammarBackend, family: str) -> None:
    calls = CallGrammar(family=FAMILIES[family], tools=TOOLS)
    one = write(matcher(backend, msgspec.structs.replace(calls, parallel=False)), backend, 1)
    answer = matcher(backend, calls)
    assert say(answer, backend, one) and not say(answer, backend, "I")


@pytest.mark.parametrize(("family", "separator"), [("hermes", "\n"), ("qwen3_coder", "\n"), ("llama3", "; ")])
def test_several_calls_may_be_forced(backend: XGrammarBackend, family: str, separator: str) -> None:
    calls = CallGrammar(family=FAMILIES[family], tools=TOOLS)
    alone = msgspec.structs.replace(calls, parallel=False)
    one = write(matcher(backend, alone), backend, 1)
    assert say(matcher(backend, calls), backend, one + separator + one)
    assert len(read(family, one + separator + one)) == 2
    assert not say(matcher(backend, alone), backend, one + separator + one)


@pytest.mark.parametrize(
    ("reasoning", "text", "allowed"),
    [
        ("", '<tool_call>\n{"name": "get", "arguments": {"city": "Rome", "n": 1}}\n</tool_call>', True),
        ("", "<think>", False),
        ("", "I look", False),
        ("open", 'hm, {<</think>\n\n<tool_call>\n{"name": "get"', True),
        ("open", "<tool_call>", True),
        ("free", "<think>hm</think>\n\n<tool_call>\n", True),
        ("free", '<tool_call>\n{"name": "set"', True),
        ("free", "hm", False),
    ],
)
def test_reasoning_comes_first_and_is_free(
    backend: XGrammarBackend, reasoning: Any, text: str, allowed: bool
) -> None:
    calls = CallGrammar(family="qwen_3", tools=TOOLS, reasoning=reasoning)
    assert say(matcher(backend, calls), backend, text) == allowed


OTHERS = [None, *(name for name, form in reply_formats().items() if not form.grammar)]


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_whose_syntax_xgrammar_lacks_calls_as_hermes_does(
    backend: XGrammarBackend, family: str | None
) -> None:
    form = enforced_form(reply_formats()[family] if family else None)
    around = {"think": form.think, "behind_reasoning": form.behind_reasoning, "frame": form.frame}
    calls = CallGrammar(family=form.grammar, tools=TOOLS, reasoning="free", **around)
    arguments = '{"city": "Rome", "n": 1}'
    call = f'{form.frame}<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'
    regions = ReplyRegions(form=form, has_calls=True, reasons=True, in_reasoning=False, tools=TOOLS)
    for thought in ("", f"{form.think[0]}hm{form.think[1]}{form.behind_reasoning}"):
        assert say(matcher(backend, calls), backend, thought + call)
        for pieces in ([thought + call], [*thought, *call]):
            reader = regions.reader()
            told = [*(reader.feed([piece]) for piece in pieces), reader.feed([], "")]
            assert "".join(said.reasoning for said in told) == ("hm" if thought else "")
            assert not any(said.content for said in told)
            told_calls = [one for said in told for one in said.calls]
            assert [one.name for one in told_calls if one.name is not None] == ["get"]
            assert "".join(one.arguments for one in told_calls) == arguments
    assert not say(matcher(backend, calls), backend, "{")


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
        {"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "object", "additionalProperties": True}}},
        {"enum": [{"a": 1}, {}]},
        {
            "$id": "https://example.org/x",
            "properties": {"a": {"$ref": "#/$defs/x"}},
            "$defs": {"x": {"enum": [1]}},
        },
    ],
    ids=str,
)
def test_arguments_are_an_object_of_their_schema(
    backend: XGrammarBackend, parameters: dict[str, Any]
) -> None:
    function = {"name": "f", "parameters": {**parameters, "type": "object"}, "strict": True}
    calls = CallGrammar(family="qwen_3", tools=[{"function": function}])
    call = '<tool_call>\n{"name": "f", "arguments": '
    for arguments, fits in (("{}}", True), ('{"a":1}}', True), ("null", False), ("1", False), ("[", False)):
        assert say(matcher(backend, calls), backend, call + arguments) == fits, arguments


@pytest.mark.parametrize(
    ("family", "begins", "has_tabs"),
    [
        ("qwen_3", '<tool_call>\n{"name": "f", "arguments": {"a": "x', False),
        ("qwen_3_coder", "<tool_call>\n<function=f>\n<parameter=a>x", True),
    ],
)
def test_a_string_with_a_length_is_json_except_in_tags(
    backend: XGrammarBackend, family: str, begins: str, has_tabs: bool
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 9}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    calls = CallGrammar(family=family, tools=[{"function": function}])
    for char, fits in (("y", True), ("\t", has_tabs), ("\x01", has_tabs)):
        assert say(matcher(backend, calls), backend, begins + char) == fits, char


def test_with_auto_text_is_free_and_a_strict_call_keeps_to_its_schema(backend: XGrammarBackend) -> None:
    calls = CallGrammar(family="qwen_3", tools=TOOLS, choice="auto")
    assert say(matcher(backend, calls), backend, "It is warm.")
    assert not say(
        matcher(backend, calls), backend, 'So: <tool_call>\n{"name": "get", "arguments": {"city": "B'
    )
    loose = [{"function": {**tool["function"], "strict": False}} for tool in TOOLS]
    calls = CallGrammar(family="qwen_3", tools=loose, choice="auto")
    assert say(matcher(backend, calls), backend, 'So: <tool_call>\n{"name": "get", "arguments": {"city": "B')
    assert not say(matcher(backend, calls), backend, 'So: <tool_call>\n{"name": "put')


def test_a_schema_that_cannot_be_enforced_is_named(backend: XGrammarBackend) -> None:
    tools = [{"function": {"name": "get", "parameters": {"type": "object", "not": {}}, "strict": True}}]
    with pytest.raises(RequestError) as refused:
        matcher(backend, CallGrammar(family="qwen_3", tools=tools))
    assert (
        refused.value.param == "calls"
        and "'get'" in refused.value.message
        and "'not'" in refused.value.message
    )
