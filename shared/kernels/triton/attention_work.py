"""The work list of paged attention: which rows attend to which keys, as numbers that the kernels read.

A *row* is one query head of one new token. The rows of the query heads that share a KV head lie side by side, token
by token, and are cut into tiles of `block_m`. Where bits matter, the keys of a sequence are cut into splits of SPLIT
keys, counted from position 0, so the keys of a split depend neither on the length of the sequence nor on its cut
into forwards. The state of a row over a split is the same however work is shared out, and the states of its splits
are merged in order. So the list decides about time and never about bits. Elsewhere a split is as long as suits.

An *item* is a tile with all keys that it sees, or a *cut* tile with the keys of one split. A cut tile leaves its
states in a workspace, and a *merge* of at most MERGE_ROWS rows adds them up. Tiles are cut where so few of them are
long that programs would stand idle (FlashDecoding, https://pytorch.org/blog/flash-decoding/). The number of programs
is fixed and the list is data, so one captured CUDA graph serves every batch.

Shapes: B sequences, L tiles, I items, M merges, P pages of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

SPLIT = 512
"""Keys of a split where bits must not depend on the list."""
MIN_SPLIT, SPLIT_UNIT, SPLITS_A_PROGRAM = 256, 64, 1
"""Elsewhere: the fewest keys of a split, what they are a multiple of, and how many splits a program is to have."""
MERGE_ROWS = 16

HEADER_WORDS = ITEM_WORDS = MERGE_WORDS = 8
"""int32 words. 32 bytes, so that an item lies in one memory sector."""


class Header(IntEnum):
    """The first words of a forward's input block, int32. Places count words of the block."""

    PAGE_TABLE = 0
    """Where the page table [B, P] begins."""
    TABLE_STRIDE = 1
    """Its P."""
    WORK = 2
    """Where the work begins."""
    WINDOW_TABLE = 3
    """Where the page table [B, P] of layers with windows begins."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Every item and merge is done once for each KV head."""

    items_I8: np.ndarray
    """sequence, index in T of its first new token, position of that token, first row, number of rows, first key,
    end of keys, first row in the workspace or -1 for a tile that is not cut."""
    merges_M8: np.ndarray
    """0, index in T of the sequence's first new token, 0, first row, number of rows, rows in the workspace from one
    split to the next, number of splits, first row in the workspace."""

    def words(self) -> np.ndarray:
        """Return what the kernels read of the work, int32: a header with the two numbers, items, merges."""
        header = np.zeros(HEADER_WORDS, dtype=np.int32)
        header[:2] = len(self.items_I8), len(self.merges_M8)
        return np.concatenate([header, self.items_I8.reshape(-1), self.merges_M8.reshape(-1)])


def attention_work(
    starts_B: np.ndarray,
    lengths_B: np.ndarray,
    *,
    group: int,
    num_kv_heads: int,
    block_m: int,
    split: int,
    num_programs: int,
    workspace_rows: int,
) -> AttentionWork:
    """List the work of `lengths_B` new tokens behind `starts_B` tokens of each sequence.

    `group` query heads share a KV head. A tile is cut if it has more than half of the splits that a program computes
    on average, the longest tiles first while `workspace_rows` suffice. Splits have `split` keys; with 0 those of a
    tile are about equal, and as long as keeps all programs busy.
    """
    rows_B = lengths_B * group
    tiles_B = -(-rows_B // block_m)
    sequence_L = np.repeat(np.arange(len(rows_B)), tiles_B)
    first_rows_L = block_m * _index_within(tiles_B)
    num_rows_L = np.minimum(rows_B[sequence_L] - first_rows_L, block_m)
    ends_L = starts_B[sequence_L] + (first_rows_L + num_rows_L - 1) // group + 1
    split_L = np.full_like(ends_L, split) if split else _even_splits(ends_L, num_kv_heads, num_programs)
    splits_L = -(-ends_L // split_L)

    longest_first = np.argsort(-splits_L, kind="stable")
    wanted_L = (splits_L > 1) & (2 * splits_L * num_programs > splits_L.sum() * num_kv_heads)
    used_L = np.cumsum((wanted_L * num_rows_L * splits_L)[longest_first])
    cut_L = np.zeros(len(wanted_L), dtype=np.bool_)
    cut_L[longest_first] = wanted_L[longest_first] & (used_L <= workspace_rows)
    workspace_L = np.cumsum(cut_L * num_rows_L * splits_L) - cut_L * num_rows_L * splits_L

    first_tokens_B = np.cumsum(lengths_B) - lengths_B
    tiles_L3 = np.stack([first_tokens_B[sequence_L], starts_B[sequence_L], first_rows_L], axis=1)
    pieces_L = np.where(cut_L, splits_L, 1)
    tile_I, piece_I = np.repeat(np.arange(len(cut_L)), pieces_L), _index_within(pieces_L)
    cut_I, ends_I, num_rows_I = cut_L[tile_I], ends_L[tile_I], num_rows_L[tile_I]
    first_keys_I = split_L[tile_I] * piece_I
    ends_I = np.where(cut_I, np.minimum(ends_I, first_keys_I + split_L[tile_I]), ends_I)
    workspace_I = np.where(cut_I, workspace_L[tile_I] + piece_I * num_rows_I, -1)
    items_I8 = np.column_stack(
        [sequence_L[tile_I], tiles_L3[tile_I], num_rows_I, first_keys_I, ends_I, workspace_I]
    )
    longest_first = np.argsort(first_keys_I - ends_I, kind="stable")
    return AttentionWork(
        items_I8[longest_first[_there_and_back(len(items_I8), num_programs // num_kv_heads)]].astype(
            np.int32
        ),
        _merges(tiles_L3[cut_L], num_rows_L[cut_L], workspace_L[cut_L], splits_L[cut_L]),
    )


def has_merges(words: np.ndarray) -> bool:
    """Tell whether `AttentionWork.words` have a merge."""
    return bool(words[1])


def most_words(
    num_tokens: int,
    num_sequences: int,
    *,
    group: int,
    block_m: int,
    split: int,
    context_length: int,
    workspace_rows: int,
) -> int:
    """Return a bound on the words of the work for any batch of that many tokens and sequences."""
    num_tiles = num_sequences + num_tokens * group // block_m
    num_items = num_tiles + min(num_tiles * -(-context_length // (split or MIN_SPLIT)), workspace_rows)
    num_merges = min(num_tiles * (block_m // MERGE_ROWS), workspace_rows)
    return HEADER_WORDS + num_items * ITEM_WORDS + num_merges * MERGE_WORDS


def _merges(
    tiles_L3: np.ndarray, num_rows_L: np.ndarray, workspace_L: np.ndarray, splits_L: np.ndarray
) -> np.ndarray:
    """Cut the rows of the tiles that were cut into merges."""
    pieces_L = -(-num_rows_L // MERGE_ROWS)
    tile_M, row_M = np.repeat(np.arange(len(pieces_L)), pieces_L), MERGE_ROWS * _index_within(pieces_L)
    merges_M8 = np.zeros((len(tile_M), MERGE_WORDS), dtype=np.int32)
    merges_M8[:, 1] = tiles_L3[tile_M, 0]
    merges_M8[:, 3] = tiles_L3[tile_M, 2] + row_M
    merges_M8[:, 4] = np.minimum(num_rows_L[tile_M] - row_M, MERGE_ROWS)
    merges_M8[:, 5] = num_rows_L[tile_M]
    merges_M8[:, 6] = splits_L[tile_M]
    merges_M8[:, 7] = workspace_L[tile_M] + row_M
    return merges_M8


def _even_splits(ends_L: np.ndarray, num_kv_heads: int, num_programs: int) -> np.ndarray:
    """The keys of a split of each tile."""
    wanted = max(ends_L.sum() * num_kv_heads // (num_programs * SPLITS_A_PROGRAM), MIN_SPLIT)
    keys_L: np.ndarray = -(-ends_L // np.maximum((ends_L + wanted // 2) // wanted, 1))
    split_L: np.ndarray = np.maximum(-(-keys_L // SPLIT_UNIT) * SPLIT_UNIT, MIN_SPLIT)
    return split_L


def _there_and_back(num_items: int, at_once: int) -> np.ndarray:
    """An order in which every second row of `at_once` items is reversed.

    Programs take items in turn, so the program with the longest item of one row has the shortest one of the next.
    """
    turns, places = np.divmod(np.arange(num_items), max(at_once, 1))
    order: np.ndarray = np.lexsort((np.where(turns % 2, -places, places), turns))
    return order


def _index_within(counts: np.ndarray) -> np.ndarray:
    """0, 1, .., count - 1 for each count."""
    firsts: np.ndarray = np.repeat(np.cumsum(counts) - counts, counts)
    indices: np.ndarray = np.arange(len(firsts)) - firsts
    return indices
