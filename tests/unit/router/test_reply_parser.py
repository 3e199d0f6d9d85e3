"""What models of each family write, read as reasoning, text and calls, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from router.text.reply_parser import (
    _MAX_HEAD_CHARS,
    NO_PARSER,
    ReplyFormat,
    ReplyRegions,
    family_of,
    find_family,
    reply_formats,
)
from shared.errors import ConfigError

PROPERTIES = {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}, "odd": {"anyOf": 5}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS: list[dict[str, Any]] = [{"function": {"name": "get", "parameters": PARAMETERS}}]
Read = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and the names and arguments of calls."""


def read(
    family: str | ReplyFormat, text: str, cuts: list[int], *, reasons: bool = True, in_reasoning: bool = False
) -> Read:
    """`text` in pieces; each call begins with its name, and indices follow each other."""
    regions = ReplyRegions(
        form=family if isinstance(family, ReplyFormat) else reply_formats().get(family_of(family)),
        has_calls=True,
        reasons=reasons,
        in_reasoning=in_reasoning,
        tools=TOOLS,
    )
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)] or [text]
    reader, reasoning, content = regions.reader(), "", ""
    calls: list[tuple[str, str]] = []
    for at, piece in enumerate(pieces, 1):
        said = reader.feed([piece], "" if at == len(pieces) else None)
        reasoning += said.reasoning
        content += said.content
        for call in said.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + call.arguments
    assert reader.num_calls == len(calls)
    assert reader.finish_reason == ("tool_calls" if calls else "stop")
    return reasoning, content, calls


GET = ("get", '{"n": 3}')
SAID: list[tuple[str, str, Read]] = [
    (
        "hermes",
        '<think>\nhm, {\n</think>\n\nI look. \n<tool_call>\n{"name": "get", "arguments": {"s": "a}\\"{<", "n": [1]}}'
        '\n</tool_call>\n<tool_call>\n{"arguments": {"é": "日"}, "name": "b"}\n</tool_call>',
        ("hm, {", "I look.", [("get", '{"s": "a}\\"{<", "n": [1]}'), ("b", '{"é": "日"}')]),
    ),
    ("hermes", " plain text, with < and {\n", ("", " plain text, with < and {\n", [])),
    ("hermes", '{"a": 1}', ("", '{"a": 1}', [])),
    ("hermes", "<think></think>\n\nyes", ("", "yes", [])),
    ("hermes", "<think>without an end", ("without an end", "", [])),
    ("hermes", '<tool_call>{"name": "get"}</tool_call>', ("", "", [("get", "{}")])),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"n\\": 3}"}</tool_call>', ("", "", [GET])),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"n": 3', ("", "", [("get", '{"n": 3')])),
    (
        "hermes",
        r'<tool_call>{"name": "\x", "arguments": {}}</tool_call>',
        ("", r'<tool_call>{"name": "\x", "arguments": {}}', []),
    ),
    ("hermes", '<tool_call>{"name": "ge', ("", '<tool_call>{"name": "ge', [])),
    ("hermes", "a <tool_call>[1</tool_call> b", ("", "a <tool_call>[1</tool_call> b", [])),
    ("hermes", '[1] <tool_call>[{"name": "get", "arguments": {"n": 3}}]</tool_call>', ("", "[1]", [GET])),
    (
        "qwen3_coder",
        "x\n<tool_call>\n<function=get>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\na\n\nb\n</parameter>\n"
        "</function>\n</tool_call>",
        ("", "x", [("get", '{"n": 3, "s": "a\\n\\nb"}')]),
    ),
    (
        "glm45",
        "<think>so</think>\n<tool_call>get\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ("so", "", [GET]),
    ),
    (
        "minimax-m2",
        '<minimax:tool_call>\n<invoke name="get">\n<parameter name="n">3</parameter>\n</invoke>\n<invoke name="b">\n'
        "</invoke>\n</minimax:tool_call>",
        ("", "", [GET, ("b", "{}")]),
    ),
    (
        "deepseekv31",
        'hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{"n": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>b<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "hi", [GET, ("b", "{}")]),
    ),
    (
        "deepseekv3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{"n": 3}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [GET]),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
        '{"n": 3}<|tool_call_end|><|tool_calls_section_end|>',
        ("", "", [GET]),
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get", "arguments": {"n": 3}}, {"name": "b", "arguments": {}}]',
        ("", "", [GET, ("b", "{}")]),
    ),
    ("mistral", 'ok[TOOL_CALLS]get[ARGS]{"n": 3}[TOOL_CALLS]b[ARGS]{}', ("", "ok", [GET, ("b", "{}")])),
    ("llama3", '{"name": "get", "parameters": {"n": 3}}', ("", "", [GET])),
    (
        "llama3",
        '<|python_tag|>{"name": "get", "parameters": {"n": 3}}; {"name": "b", "parameters": {}}',
        ("", "", [GET, ("b", "{}")]),
    ),
    ("llama3", 'see {"name": "get"}', ("", 'see {"name": "get"}', [])),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"
        "Write to=functions.get or to=python.<|return|>",
        ("hm", "Write to=functions.get or to=python.", []),
    ),
    (
        "gpt-oss",
        "<|channel|>final<|message|>yes<|end|><|start|>assistant<|channel|>commentary to=functions.ge",
        ("", "yes", []),
    ),
]
PLACES = st.lists(st.integers(0, 400), max_size=12)


@pytest.mark.parametrize(
    ("family", "text", "expected"), SAID, ids=[f"{one[0]}-{at}" for at, one in enumerate(SAID)]
)
def test_any_cut_of_an_answer_is_read_alike(family: str, text: str, expected: Read) -> None:
    assert read(family, text, []) == expected
    assert read(family, text, [*range(len(text))]) == expected

    @given(PLACES)
    def check(cuts: list[int]) -> None:
        assert read(family, text, cuts) == expected

    check()


OWN_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<hm>", "close": "</hm>", "content": "text"},
        "tool_calls": {
            "open_pattern": "<call (?P<name>[a-z]+)>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<end>"], "content": "text"},
    },
}


UNREADABLE = {
    "half of a character": ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
    "no number": ("hermes", '<tool_call>[{"name": "get", "arguments": {"n": NaN}}]</tool_call>'),
    "half in an object": (
        "qwen3_coder",
        r'<function=get><parameter=o>{"a": "\ud800"}</parameter></function>',
    ),
    "levels": ("qwen3_coder", f"<function=get><parameter=o>{'[' * 20_000}</parameter></function>"),
    "no schema": ("qwen3_coder", "<function=get><parameter=odd>a</parameter></function>"),
    "digits": ("gemma4", f"<|tool_call>call:get{{n:{'9' * 5000}}}<tool_call|>"),
    "a mark of the parser": ("gemma4", "<|tool_call>call:get{n:\x01}<tool_call|>"),
}


@pytest.mark.parametrize(("family", "text"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_call_that_cannot_be_read_is_text(family: str, text: str) -> None:
    before = "yes "
    for cuts in ([], [len(before)], [*range(len(before), len(before) + 40)]):
        reasoning, content, calls = read(family, before + text, cuts)
        assert (reasoning, calls) == ("", [])
        assert content.startswith(before)
        json.dumps(content, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<hm>so</hm>I look.<call get>{"n": 3}</call><call b>{}</call><end>',
            ("so", "I look.", [GET, ("b", "{}")]),
        ),
        ("<call get>{n</call>", ("", "{n", [])),
        ("plain", ("", "plain", [])),
    ],
)
def test_a_checkpoint_may_describe_its_answers_itself(text: str, expected: Read) -> None:
    form = ReplyFormat.of_checkpoint(OWN_TEMPLATE)
    assert read(form, text, []) == read(form, text, [*range(len(text))]) == expected
    for broken in (
        {},
        {"fields": {"content": {"content": "x"}}},
        {"fields": {"tool_calls": {"open_pattern": "("}}},
    ):
        with pytest.raises(ConfigError, match="response_template"):
            ReplyFormat.of_checkpoint(broken)


PARTS = [
    *("<think>", "</think>", "{", "}", "[", "]", '"', "\\", ":", ",", ";", "<", ">", "a", "é", "3", "null"),
    *(" ", "\n", '{"name": "get"', ', "arguments": ', '{"n": 1}', "get", "functions.get:0", "[ARGS]"),
    *("```json\n", "<function=get>", "</function>", "<parameter=n>", "</parameter>"),
    *("<arg_key>n</arg_key>", "<arg_value>", "</arg_value>"),
    *('<invoke name="get">', "</invoke>", '<parameter name="n">'),
]


@pytest.mark.parametrize("family", reply_formats())
def test_whatever_a_model_writes_is_read_alike_in_any_cut(family: str) -> None:
    parts = st.sampled_from([*reply_formats()[family].strings, *PARTS])

    @given(st.lists(parts, max_size=14).map("".join), PLACES, st.booleans())
    @example("<tool_call><tool_call>{{", [12, 22], True)
    def check(text: str, cuts: list[int], in_reasoning: bool) -> None:
        whole = read(family, text, [], in_reasoning=in_reasoning)
        assert read(family, text, cuts, in_reasoning=in_reasoning) == whole
        assert read(family, text, [*range(len(text))], in_reasoning=in_reasoning) == whole

    check()


def hermes_regions(*, reasons: bool = False) -> ReplyRegions:
    return ReplyRegions(form=reply_formats()["hermes"], has_calls=True, reasons=reasons, in_reasoning=False)


def test_the_arguments_of_a_call_are_told_as_they_come() -> None:
    reader = hermes_regions().reader()
    pieces = ('<tool_call>{"name": "get", "arg', 'uments": {"s": "a', "b", 'c"}}', "</tool_call>")
    told = [[(call.name, call.arguments) for call in reader.feed([piece]).calls] for piece in pieces]
    assert told == [[], [("get", '{"s": "a')], [(None, "b")], [(None, 'c"}')], []]


@pytest.mark.parametrize("at", range(30, 59))
def test_the_arguments_of_a_call_that_is_cut_off_are_told_as_far_as_they_came(at: int) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": {"b": "}"}, "c'[:at]
    regions = hermes_regions()
    for pieces in ([text], [*text]):
        reader = regions.reader()
        told = [*(reader.feed([piece]) for piece in pieces), reader.feed([], "", is_cut=True)]
        assert "".join(call.arguments for said in told for call in said.calls) == text[38:]
        assert not any(said.content for said in told)


def test_a_long_text_that_is_no_call_is_searched_for_one_within_bounds() -> None:
    """The head of a call in JSON is looked for again with each piece, so it has a bound: the same in any cut."""
    for length, is_told_early in ((100, True), (_MAX_HEAD_CHARS, False)):
        text = f'<tool_call>{{"id": "{"x" * length}", "name": "f", "arguments": {{"a": 1}}'
        regions = hermes_regions()
        for pieces in ([text], [*text]):
            reader = regions.reader()
            assert any(reader.feed([piece]).calls for piece in pieces) == is_told_early
        assert read("hermes", text + "}</tool_call>", [*range(len(text))]) == ("", "", [("f", '{"a": 1}')])


def test_nothing_but_what_may_become_a_call_is_held_back() -> None:
    reader = hermes_regions(reasons=True).reader()
    assert [reader.feed([piece]).content for piece in ("a", "b <t", "o b", " ", "c")] == [
        "a",
        "b",
        " <to b",
        "",
        " c",
    ]


def test_a_prompt_may_end_in_reasoning() -> None:
    assert read("hermes", "\nhm\n</think>\n\nyes", [], in_reasoning=True) == ("hm", "yes", [])
    assert read("none", "<think>hm</think>yes", []) == ("hm", "yes", [])


def test_families_are_found_by_their_chat_templates() -> None:
    for family, one in reply_formats().items():
        assert find_family([" ".join(one.found_by)]) == family
        assert {family_of(name) for name in (family, *one.aliases)} == {family}
    assert find_family(["{{ messages }}"]) == family_of("none") == NO_PARSER
    with pytest.raises(ConfigError) as refused:
        family_of("hermes3")
    assert "--tool-call-parser hermes3" in str(refused.value)


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; from router.text.reply_parser import ReplyRegions as R; "
        "R(form=None, has_calls=False, reasons=True, in_reasoning=False).reader(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("family", reply_formats())
def test_what_is_held_back_and_looked_at_again_is_bounded(family: str) -> None:
    """So the cost of a text is linear: patterns have bounded parts, and of any text little waits to become a tag."""
    form = reply_formats()[family]
    patterns = [form.name, form.dropped_pattern, form.close_behind, form.think_cut_by]
    patterns += [form.call.get("open_pattern"), form.call.get("close_pattern")]
    for pattern in filter(None, patterns):
        assert not regex.search(r"(?<!\\)[*+](?![?+])", regex.sub(r"\[[^]]*\]", "[]", pattern)), pattern
    for part in (*form.strings, *PARTS):
        if not part.strip() or part in form.strings:
            continue
        regions = ReplyRegions(form=form, has_calls=True, reasons=False, in_reasoning=False, tools=TOOLS)
        reader, num_told, num_fed = regions.reader(), 0, 0
        for _ in range(400):
            said = reader.feed([part])
            num_told += len(said.content) + sum(len(call.arguments) for call in said.calls)
            num_fed += len(part)
        if not reader.num_calls and reader._region == "content":
            assert num_fed - num_told <= 600, part
