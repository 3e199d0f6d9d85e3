"""How nodes and routers name cached prefixes: one hash for each page, chained over the pages before it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

import xxhash


def root_hash(extra_key: str) -> int:
    """What the chain of a prefix begins with; requests with different `extra_key` share nothing."""
    return xxhash.xxh3_64_intdigest(extra_key.encode())


def next_hash(parent: int, token_ids: Sequence[int]) -> int:
    """The hash of the page with `token_ids` after the page with hash `parent`; not safe against made collisions."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"{len(token_ids)}q", *token_ids), seed=parent)


def block_hashes(ids: Sequence[int], page_size: int, extra_key: str = "") -> Iterator[int]:
    """The hash of every whole page of `ids`, in order; as vLLM names the blocks of its prefix cache."""
    last = root_hash(extra_key)
    for at in range(0, len(ids) - page_size + 1, page_size):
        last = next_hash(last, ids[at : at + page_size])
        yield last


class BlockHashes(Sequence[int]):
    """`block_hashes`, computed up to the last one that was looked at: of a long prompt, few are."""

    def __init__(self, ids: Sequence[int], page_size: int, extra_key: str = "") -> None:
        self._num_blocks = len(ids) // page_size
        self._to_make = block_hashes(ids, page_size, extra_key)
        self._made: list[int] = []

    def __len__(self) -> int:
        return self._num_blocks

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        num_needed = at + 1 if isinstance(at, int) and at >= 0 else self._num_blocks
        self._made += islice(self._to_make, max(0, num_needed - len(self._made)))
        return self._made[at]
