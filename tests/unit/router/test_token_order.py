"""Each position once and in order, whatever arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.running_req import TokenOrder


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A length, and overlapping spans that cover it together, in any order, some of them twice."""
    length = draw(st.integers(1, 20))
    spans = [(i, i + 1) for i in range(length)]
    extra = st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda s: (min(s), max(s)))
    spans += draw(st.lists(extra, max_size=10))
    return length, draw(st.permutations(spans))


@given(arrivals(), st.integers(0, 30))
def test_everything_arrives_once_and_in_order(
    case: tuple[int, list[tuple[int, int]]], finish_after: int
) -> None:
    length, spans = case
    order = TokenOrder(0)
    forwarded: list[int] = []
    for at, (start, end) in enumerate(spans):
        if at == finish_after:
            order.finish_at(length)
        forwarded += order.add(start, [100 + i for i in range(start, end)])
        assert forwarded == [100 + i for i in range(len(forwarded))]
    order.finish_at(length)
    assert forwarded == [100 + i for i in range(length)]
    assert order.finished


def test_nothing_after_the_end() -> None:
    order = TokenOrder(0)
    assert order.add(2, [2, 3, 4, 5]) == []
    order.finish_at(4)
    assert order.add(0, [0, 1]) == [0, 1, 2, 3]
    assert order.add(4, [4]) == []
    ended = TokenOrder(0)
    ended.finish_at(2)
    assert ended.add(0, [7, 8, 9]) == [7, 8]
    assert ended.finished


def test_an_end_with_no_token() -> None:
    order = TokenOrder(0)
    order.finish_at(0)
    assert order.finished


def test_the_first_of_two_tokens_at_a_position_stays() -> None:
    order = TokenOrder(0)
    assert order.add(1, [11]) == []
    assert order.add(1, [99]) == []
    assert order.add(0, [10]) == [10, 11]
