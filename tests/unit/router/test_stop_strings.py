"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.request.output_text import StopMatcher
from router.text.stops import StopConditions

texts = st.text("ab\n", max_size=30)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)
cuts = st.lists(st.integers(0, 100), max_size=10)


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def scan(text: str, stops: list[str], cuts: list[int], *, keep: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(StopConditions(stops), keep=keep)
    shown = ""
    for piece in cut(text, cuts):
        found = matcher.feed(piece)
        shown += found.text
        if found.matched is not None:
            return shown, found.matched
    return shown + matcher.flush(), None


def slowly(text: str, stops: list[str], first_end: int = 0) -> tuple[str, str | None]:
    """The specification: look after each character."""
    for end in range(first_end, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(texts, stops, cuts)
@example("abab", ["abb", "ba"], [1, 2, 3])
def test_any_cut_gives_what_the_specification_says(text: str, stops: list[str], cuts: list[int]) -> None:
    assert scan(text, stops, cuts) == slowly(text, stops)


@given(texts, stops, cuts)
def test_kept_stops_stay_in_the_text(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, matched = scan(text, stops, cuts, keep=True)
    before, expected = slowly(text, stops)
    assert matched == expected
    assert shown == before + (matched or "")


@given(texts, stops)
def test_exactly_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    text, _ = slowly(text, stops)
    matcher = StopMatcher(StopConditions(stops))
    shown = ""
    for end, char in enumerate(text, 1):
        shown += matcher.feed(char).text
        tails = [text[at:end] for at in range(end + 1)]
        longest = next(tail for tail in tails if any(s.startswith(tail) and s != tail for s in stops))
        assert shown == text[: end - len(longest)]


@given(texts, texts, stops, cuts)
def test_a_stop_may_begin_where_none_may_be_completed(
    early: str, late: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(StopConditions(stops))
    shown = "".join(matcher.feed(piece, armed=False).text for piece in cut(early, cuts))
    matched = None
    for piece in cut(late, cuts):
        found = matcher.feed(piece)
        shown, matched = shown + found.text, found.matched
        if matched is not None:
            break
    assert (shown + matcher.flush(), matched) == slowly(early + late, stops, len(early) + 1)


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.booleans()), max_size=10), stops)
def test_hidden_text_is_matched_but_not_shown(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    matcher = StopMatcher(StopConditions(stops))
    shown, matched = "", None
    for piece, visible in pieces:
        found = matcher.feed(piece, visible=visible)
        shown, matched = shown + found.text, found.matched
        if matched is not None:
            break
    before, expected = slowly("".join(piece for piece, _ in pieces), stops)
    all_visible = [visible for piece, visible in pieces for _ in piece]
    assert matched == expected
    assert shown + matcher.flush() == "".join(itertools.compress(before, all_visible))


@pytest.mark.parametrize(
    ("piece", "shown"),
    [("hello", "hello"), ("hello\n", "hello"), ("a\n\nHum", "a"), ("a\n\nHumble", "a\n\nHumble")],
)
def test_only_a_possible_stop_is_held_back(piece: str, shown: str) -> None:
    assert StopMatcher(StopConditions(["\n\nHuman:"])).feed(piece).text == shown


def test_the_earlier_of_two_in_one_piece_wins() -> None:
    found = StopMatcher(StopConditions(["later", "first"])).feed("x first then later")
    assert (found.text, found.matched) == ("x ", "first")


def test_stops_that_are_endings_of_each_other_nest() -> None:
    matcher = StopMatcher(StopConditions(["a" * at + "bc" for at in range(1, 17)]))
    assert matcher.feed("a" * 2000 + "b").text == "a" * 1984
    found = matcher.feed("c")
    assert (found.text, found.matched) == ("", "a" * 16 + "bc")
