"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.stop_strings import StopMatcher

texts = st.text("ab\n", max_size=30)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def scan(text: str, stops: list[str], cuts: list[int], *, keep: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, keep=keep)
    shown = ""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        found = matcher.feed(text[start:end])
        shown += found.text
        if found.matched is not None:
            return shown, found.matched
    return shown + matcher.flush(), None


def slowly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The specification: look after each character."""
    for end in range(len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(texts, stops, st.lists(st.integers(0, 100), max_size=10))
@example("abab", ["abb", "ba"], [1, 2, 3])
def test_any_cut_gives_what_the_specification_says(text: str, stops: list[str], cuts: list[int]) -> None:
    assert scan(text, stops, cuts) == slowly(text, stops)


@given(texts, stops, st.lists(st.integers(0, 100), max_size=10))
def test_kept_stops_stay_in_the_text(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, matched = scan(text, stops, cuts, keep=True)
    before, expected = slowly(text, stops)
    assert matched == expected
    assert shown == before + (matched or "")


@pytest.mark.parametrize(
    ("piece", "shown"),
    [("hello", "hello"), ("hello\n", "hello"), ("a\n\nHum", "a"), ("a\n\nHumble", "a\n\nHumble")],
)
def test_only_a_possible_stop_is_held_back(piece: str, shown: str) -> None:
    assert StopMatcher(["\n\nHuman:"]).feed(piece).text == shown


def test_the_earlier_of_two_in_one_piece_wins() -> None:
    found = StopMatcher(["later", "first"]).feed("x first then later")
    assert (found.text, found.matched) == ("x ", "first")
