"""Strings and patterns that end a text which arrives in pieces."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import re
from pathlib import Path

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.request.output_text import StopMatcher, stop_conditions
from router.request.prompt import AnswerOptions
from router.text.stops import (
    CONTEXT_CHARS,
    MAX_HELD_CHARS,
    MAX_MATCH_CHARS,
    MAX_PATTERN_SIZE,
    StopConditions,
    StopCursor,
    expanded_size,
)
from router.text.tokenizer import TextWorkers
from shared.errors import RequestError
from shared.protocol.messages import Decode, Finish, Prefill
from tests.unit.router.fake_node import FakeNode, byte_level_tokenizer
from tests.unit.router.fakes import joined_pair

LOCAL_PATTERNS = (
    "ab",
    "a+b",
    "b|abc",
    "ab|bca",
    "^ab",
    "(?m)^b",
    "(?<=a)b",
    "(?<=\n)",
    "(a|b)\\1",
    "[^a]{2,4}a",
    "a.*?b",
    "(?i)B{3}",
    "\\Bab",
    "(?:a|ab)(?:c|bcd)",
    "c(?=ab)",
    "(?s)a.*c",
)
"""What they match does not change when text comes behind it."""


def scan(
    text: str, cuts: list[int], patterns: list[str], stops: list[str], *, keep: bool = False
) -> tuple[str, str | None]:
    matcher = StopMatcher(StopConditions(stops, patterns), keep=keep)
    shown = ""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        found = matcher.feed(text[start:end])
        shown += found.text
        if found.matched is not None:
            return shown, found.matched
    return shown + matcher.flush(), None


def slowly(text: str, patterns: list[str], stops: list[str], *, keep: bool = False) -> tuple[str, str | None]:
    """The specification: look after each character, by Python's own `re`."""
    for end in range(1, len(text) + 1):
        so_far = text[:end]
        found = [(m.start(), p) for p in patterns if (m := re.search(p, so_far))]
        found += [(end - len(stop), stop) for stop in stops if so_far.endswith(stop)]
        if found:
            start, matched = min(found)
            return text[: end if keep else start], matched
    return text, None


several_stops = st.lists(st.text("abc\n", min_size=1, max_size=4), max_size=4, unique=True)


@given(
    st.text("abc\n", max_size=24),
    st.lists(st.integers(0, 100), max_size=12),
    st.tuples(st.lists(st.sampled_from(LOCAL_PATTERNS), max_size=3, unique=True), several_stops).filter(any),
    st.booleans(),
)
@example("abab", [1, 2, 3], ([], ["abb", "ba"]), False)
@settings(max_examples=600)
def test_any_cut_gives_what_the_specification_says(
    text: str, cuts: list[int], both: tuple[list[str], list[str]], keep: bool
) -> None:
    assert scan(text, cuts, *both, keep=keep) == slowly(text, *both, keep=keep)


@given(st.text("abc\n", max_size=24), several_stops.filter(bool))
def test_exactly_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    text, _ = slowly(text, [], stops)
    matcher = StopMatcher(StopConditions(stops))
    shown = ""
    for end, char in enumerate(text, 1):
        shown += matcher.feed(char).text
        tails = [text[at:end] for at in range(end + 1)]
        longest = next(tail for tail in tails if any(s.startswith(tail) and s != tail for s in stops))
        assert shown == text[: end - len(longest)]


@pytest.mark.parametrize(
    ("pattern", "piece", "shown"),
    [
        (r"\n\n\w+:", "answer\n\nHuman", "answer"),
        (r"\n\n\w+:", "answer\n\nHuman and", "answer\n\nHuman and"),
        (r"\d{4}", "in 19", "in "),
        (r"(?<=a)b", "aaa", "aaa"),
        (r"[\s\S]*x", "abc", ""),
    ],
)
def test_only_a_possible_match_is_held_back(pattern: str, piece: str, shown: str) -> None:
    assert StopMatcher(StopConditions([], [pattern])).feed(piece).text == shown


def test_the_end_so_far_is_an_end() -> None:
    """As in SGLang: after each token."""
    matcher = StopMatcher(StopConditions([], [r"END\b"]))
    assert matcher.feed("ENDING ").matched is None
    assert matcher.feed("END").matched == r"END\b"


def test_a_match_that_is_complete_too_early_does_not_count() -> None:
    matcher = StopMatcher(StopConditions([], ["a+b"]))
    assert matcher.feed("aab aa", armed=False).matched is None
    found = matcher.feed("b")
    assert (found.text, found.matched) == ("", "a+b")


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\b", "Hello, world", "H"),
        (r"\b", " Hello", " "),
        (r"\b|\d", "Hello", "H"),
        (r"\b(?!x)", "Hello", "H"),
        ("(?=H)", "Hello, Hugo", "Hello, "),
        ("(?=[a-z])|x", "xx", "x"),
        ("(?<=\n)", "\nHello", "\n"),
        (r"(?m)^\w", "Hello", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 20])
def test_a_match_of_no_characters_does_not_end_a_text_before_it_begins(
    pattern: str, text: str, shown: str, size: int
) -> None:
    assert scan(text, [*range(size, len(text), size)], [pattern], []) == (shown, pattern)


@pytest.mark.parametrize("pattern", [r"\b", "(?=.)", "(?=a)"])
def test_such_a_match_holds_no_text_back(pattern: str) -> None:
    matcher = StopMatcher(StopConditions([], [pattern]))
    assert matcher.feed("a", armed=False).text == "a"


def test_what_is_held_back_is_bounded_but_the_match_is_found() -> None:
    matcher = StopMatcher(StopConditions([], [r"<a>[\s\S]*?</a>"]))
    text = "<a>" + "x" * 5000 + "</a> and more"
    shown, held = "", 0
    for end, char in enumerate(text, 1):
        found = matcher.feed(char)
        shown += found.text
        if found.matched is not None:
            break
        held = max(held, end - len(shown))
    assert held == MAX_HELD_CHARS
    assert end == len(text) - len(" and more")
    assert shown == text[: len(shown)] and len(shown) == end - 1 - MAX_HELD_CHARS


def test_text_that_cannot_matter_is_forgotten() -> None:
    cursor = StopCursor(StopConditions((), ["^ab", r"(?m)^b\d"]))
    for _ in range(100):
        cursor.feed(f"x{'y' * 998}\n")
        assert len(cursor._text) <= 1000 + 2 * CONTEXT_CHARS
    assert cursor.feed("ab") is None, "^ is the beginning of all of the text"
    found = cursor.feed("\nb1")
    assert found is not None
    assert (found.start, found.end, found.matched) == (100_003, 100_005, r"(?m)^b\d")


def test_a_match_that_does_not_end_is_given_up() -> None:
    cursor = StopCursor(StopConditions((), ["<[^>]*>"]))
    cursor.feed("<")
    for _ in range(80):
        cursor.feed("y" * 500)
        assert len(cursor._text) <= MAX_MATCH_CHARS + 500 + 2 * CONTEXT_CHARS
    assert cursor.feed(">") is None


@pytest.mark.parametrize("pattern", [r"(a?){30}a{30}b", r"(?:a.*){12}b"])
def test_a_pattern_that_takes_too_long_fails_its_request(pattern: str) -> None:
    matcher = StopMatcher(StopConditions([], [pattern]))
    with pytest.raises(RequestError, match="too long") as refused:
        all(matcher.feed("a" * 20).matched is None for _ in range(300))
    assert (refused.value.status, refused.value.param) == (400, "stop_regex")


@pytest.mark.parametrize("armed", [True, False])
def test_a_long_piece_of_text_that_needs_many_searches_is_given_up_between_them(armed: bool) -> None:
    searches = itertools.count()
    cursor = StopCursor(StopConditions((), ["x|ab"]), cpu_clock=lambda: 1e-3 * next(searches))
    with pytest.raises(RequestError, match="too long"):
        cursor.feed("c" * 1000 + "ab" if armed else "x" * 1000, armed=armed)
    assert next(searches) < 60


UNUSABLE = ("(", "a*", "(?r)ab", "(" * 600 + ")" * 600, "a{99999999999999999999}", "(?V0)(?V1)a", "a{2i<}")
UNUSABLE += ("(?a)(?u)x", "(?(²)a|b)", r"\N{LATIN SMALL LETTER R WITH TILDE}")


@pytest.mark.parametrize("pattern", UNUSABLE)
def test_patterns_that_cannot_be_used_are_refused(pattern: str) -> None:
    with pytest.raises(RequestError) as refused:
        StopConditions([], ["fine", pattern])
    assert refused.value.param == "stop_regex[1]"


def prompts_with(*patterns: tuple[str, ...]) -> list[AnswerOptions]:
    return [AnswerOptions(stop_regex=several) for several in patterns]


def test_the_prompts_of_a_request_share_what_is_compiled() -> None:
    first, second, third = asyncio.run(stop_conditions(prompts_with(("a",), ("b",), ("a",)), TextWorkers()))
    assert first is third is not second


def test_the_sequences_of_a_request_share_the_time_of_searches() -> None:
    """A clock that each reading takes a millisecond further: half as many feeds for two as for one each."""

    def num_feeds(num_prompts: int) -> int:
        readings, num_fed = itertools.count(), 0
        prompts = prompts_with(*((f"x|a{at}",) for at in range(num_prompts)))
        cursors = [
            StopCursor(conditions, cpu_clock=lambda: 1e-3 * next(readings))
            for conditions in asyncio.run(stop_conditions(prompts, TextWorkers()))
            if conditions is not None
        ]
        try:
            while num_fed < 1000:
                for cursor in cursors:
                    cursor.feed("c")
                num_fed += 1
        except RequestError:
            pass
        return num_fed

    assert 5 < num_feeds(1) < 1000
    assert num_feeds(2) == num_feeds(1) // 2


def test_the_patterns_of_a_request_are_bounded_together() -> None:
    patterns = [(chr(97 + at) * 1024,) for at in range(17)]
    with pytest.raises(RequestError, match="16384"):
        asyncio.run(stop_conditions(prompts_with(*patterns), TextWorkers()))


TOO_LARGE = (
    "(((a{900}){900}){900}){900}q",
    "(a{1000}){1000}",
    "(?:(?:a*){900}){900}",
    "(?=a{1000}){1000}",
    "(" * 60 + "a" + "+)" * 60,
    "(" * 25 + "a" + "{1,2}b)" * 25,
    r"\[(a{1000}){1000}\]",
    "(((a{0000000900}){0000000900}){0000000900}){0000000900}q",
    "[^a[](a{1000}){1000}[]]",
    "[](](a{1000}){1000}[)]",
    "[^](](a{1000}){1000}[)]",
    "(?i)(?s-i:(?P<x>a{1000})){1000}(?P=x)",
    "(?x) # [\n (a{1000}){1000} # ]",
    "(?ix) (a{1000}) # no more\n {1000}",
    "(?#[)(a{1000}){1000}(?#])",
    "(((a{900})(?#){900})(?#){900})(?#){900}q",
    "(a{900})(?i){900}",
    "(a{900}){e<=0}{900}",
    "(a{900}){2i+1d<3}{900}",
    "[[:alpha:][](((a{900}){900}){900}){900}q]",
    "[^[:alpha:]^[]((a{900}){900})q]",
)
"""With their repeats written out."""


@pytest.mark.parametrize("pattern", TOO_LARGE)
def test_a_pattern_that_might_be_too_large_is_refused_before_it_is_compiled(pattern: str) -> None:
    with pytest.raises(RequestError, match="16384") as refused:
        asyncio.run(stop_conditions(prompts_with((pattern,)), TextWorkers()))
    assert (refused.value.status, refused.value.param) == (400, "stop_regex")


@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        r"(\d{1,3}\.){3}\d{1,3}",
        r"\d{4}-\d{2}-\d{2}T(\d{2}:){2}\d{2}",
        r"(\w+ )+(and|or)( \w+)+[.?!]{1,3}",
        r'\{"name": "\w{3,64}"}',
        "(a{0,900}){0,900}",
    ],
)
def test_patterns_as_people_write_them_are_small(pattern: str) -> None:
    assert expanded_size(pattern) < MAX_PATTERN_SIZE / 4


_PIECES = st.recursive(
    st.sampled_from(
        ["a", r"\d", "[b-d]", "[^]]", "[]{9}(]", "[[]", r"\p{L}", ".", "(?>f)", "^", r"\b", "(?=e)", "(?i:g)"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda several: f"(?:{'|'.join(several)})"),
        st.tuples(
            inner, st.sampled_from(["{3}", "{2,}", "{0,4}", "{,2}", "{1,2}?", "+", "++", "*", "?"])
        ).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=12,
)


@given(_PIECES)
@settings(max_examples=400)
def test_what_is_compiled_is_bounded_by_the_size(pattern: str) -> None:
    size = expanded_size(pattern)
    if size <= MAX_PATTERN_SIZE:
        program = pickle.dumps(regex.compile(pattern, cache_pattern=False))
        assert len(program) <= 40 * size + 500


async def test_a_pattern_that_takes_too_long_fails_alone(model_folder: Path) -> None:
    async def tell_the_same(node: FakeNode, message: Prefill | Decode) -> None:
        ids = [byte_level_tokenizer().token_to_id("a")] * 150
        node.tokens(message.key, 0, ids, Finish("length"))

    async with joined_pair(model_folder, decode=tell_the_same) as (_, _, client):
        body = {
            "text": ["one", "two"],
            "sampling_params": [
                {"max_new_tokens": 150},
                {"max_new_tokens": 150, "stop_regex": r"(a?){40}a{40}b"},
            ],
        }
        refused = await client.post("/generate", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("prompt 1: sampling_params[1].stop_regex")
        alone = {"text": "one", "sampling_params": {"max_new_tokens": 150}}
        assert (await client.post("/generate", json=alone)).status_code == 200


def test_a_long_string_is_searched_in_no_time() -> None:
    """The library would make a table for it, for longer than the budget of a request."""
    stop, text = "b" + "a" * 1019, "c" * 80 + "b" + "a" * 1030
    assert scan(text, list(range(0, len(text), 8)), [], [stop]) == ("c" * 80, stop)


def test_the_library_keeps_no_pattern() -> None:
    StopConditions([f"a{at}" for at in range(9)], ["b+"])
    StopConditions(["last"])
    assert len(regex._main._locale_sensitive) == 1
