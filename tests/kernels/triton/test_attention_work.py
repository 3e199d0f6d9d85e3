"""The work list of attention: each row meets each key that it sees once, and merges find what items leave."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from shared.kernels.triton.attention_work import (
    MERGE_ROWS,
    MIN_SPLIT,
    SPLIT,
    SPLIT_UNIT,
    AttentionWork,
    attention_work,
    has_merges,
    most_words,
)

BLOCK_M = 64

starts = st.one_of(st.sampled_from([0, SPLIT - 1, SPLIT, 2 * SPLIT]), st.integers(0, 3000))
lengths = st.one_of(st.just(1), st.integers(1, 200))
batches = st.lists(st.tuples(starts, lengths), min_size=1, max_size=6)


def work_of(
    batch: list[tuple[int, int]], group: int, num_programs: int, workspace_rows: int, split: int = SPLIT
) -> AttentionWork:
    starts_B, lengths_B = np.array(batch).T
    return attention_work(
        starts_B,
        lengths_B,
        group=group,
        num_kv_heads=2,
        block_m=BLOCK_M,
        split=split,
        num_programs=num_programs,
        workspace_rows=workspace_rows,
    )


@given(
    batch=batches,
    group=st.integers(1, 16),
    num_programs=st.sampled_from([1, 10, 1000]),
    workspace_rows=st.sampled_from([0, 100, 5000, 10**6]),
    split=st.sampled_from([0, SPLIT]),
)
@example(batch=[(3000, 1)], group=1, num_programs=1000, workspace_rows=5000, split=0)
def test_every_row_is_computed_once(
    batch: list[tuple[int, int]], group: int, num_programs: int, workspace_rows: int, split: int
) -> None:
    """Keys are counted in units, of which every split has a whole number but the last one of a tile."""
    work = work_of(batch, group, num_programs, workspace_rows, split)
    unit = split or SPLIT_UNIT
    first_tokens = np.cumsum([0] + [length for _, length in batch]).tolist()
    seen: Counter[tuple[int, int, int]] = Counter()
    """(sequence, row, unit of keys)"""
    states: dict[int, tuple[int, int, int, int]] = {}
    """(first token of the sequence, row, first key, end of keys)"""
    outputs: Counter[tuple[int, int]] = Counter()
    """(first token of the sequence, row)"""
    for sequence, first_token, start, first_row, num_rows, first_key, end_key, at in work.items_I8.tolist():
        assert (first_token, start) == (first_tokens[sequence], batch[sequence][0])
        assert first_row % BLOCK_M == 0 and 0 < num_rows <= BLOCK_M
        assert first_key % unit == 0 and first_key < end_key
        assert end_key <= start + (first_row + num_rows - 1) // group + 1
        for row in range(first_row, first_row + num_rows):
            for one in range(first_key // unit, -(-end_key // unit)):
                seen[sequence, row, one] += 1
            if at < 0:
                assert end_key > start + row // group, "a whole tile has every key of its rows"
                outputs[first_token, row] += 1
            else:
                assert not split or end_key - first_key <= split
                place = at + row - first_row
                assert place not in states and place < workspace_rows
                states[place] = first_token, row, first_key, end_key
    for _, first_token, _, first_row, num_rows, stride, num_splits, at in work.merges_M8.tolist():
        assert 0 < num_rows <= MERGE_ROWS
        for row in range(first_row, first_row + num_rows):
            end = 0
            for one in range(num_splits):
                *state, first, behind = states.pop(at + one * stride + row - first_row)
                assert state == [first_token, row] and first == end
                end = behind
            outputs[first_token, row] += 1
    assert not states
    for sequence, (start, length) in enumerate(batch):
        for row in range(length * group):
            assert outputs.pop((first_tokens[sequence], row)) == 1
            for one in range((start + row // group) // unit + 1):
                assert seen[sequence, row, one] == 1
    assert not outputs
    total = sum(length for _, length in batch)
    bound = most_words(
        total,
        len(batch),
        group=group,
        block_m=BLOCK_M,
        split=split,
        context_length=3200,
        workspace_rows=workspace_rows,
    )
    assert len(work.words()) <= bound


def test_few_long_sequences_are_cut_and_many_are_not() -> None:
    few = work_of([(10 * SPLIT, 1)], 4, 100, 10**6)
    assert len(few.items_I8) == 11 and has_merges(few.words())
    many = work_of([(10 * SPLIT, 1)] * 1000, 4, 100, 10**6)
    assert len(many.items_I8) == 1000 and not has_merges(many.words())


def test_splits_follow_from_what_there_is_to_do() -> None:
    """One long sequence is cut as finely as pays, many are cut until all programs have work, and more are whole."""

    def keys(batch: list[tuple[int, int]]) -> set[int]:
        items_I8 = work_of(batch, 4, 264, 10**6, split=0).items_I8
        return {*(items_I8[:, 6] - items_I8[:, 5]).tolist()}

    assert keys([(2047, 1)]) == {MIN_SPLIT}
    assert keys([(2047, 1)] * 64) == {1024}
    assert keys([(2047, 1)] * 1000) == {2048}
    assert keys([(8191, 1)] + [(63, 1)] * 2000) == {64, 1024}, "no program waits for the long one"


@pytest.mark.parametrize("num_tokens", [320, 2048])
def test_programs_have_equal_shares_of_a_prefill(num_tokens: int) -> None:
    items_I8 = work_of([(0, num_tokens)], 4, 20, 0).items_I8
    shares = [int((items_I8[i::10, 6] - items_I8[i::10, 5]).sum()) for i in range(10)]  # of 2 KV heads
    assert max(shares) - min(shares) <= 2 * BLOCK_M, shares


def test_the_longest_items_come_first() -> None:
    ends = work_of([(0, 300)], 8, 1, 0).items_I8[:, 6]
    assert (np.diff(ends) <= 0).all()
