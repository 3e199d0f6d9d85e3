"""What the digest of a chunk finds. The native digest is compared with this one in `cpu/test_pages.py`."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shared.kvcache.page_digest import chunk_digest

SHAPES = [(1, 8), (2, 64), (6, 256), (5, 960), (3, 24), (4, 1000)]
"""Slices, and bytes of a slice."""
CONTENTS = ["random", "zeros", "ones"]


def make_chunk(shape: tuple[int, int], content: str) -> torch.Tensor:
    if content == "random":
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return torch.full(shape, 0 if content == "zeros" else 255, dtype=torch.uint8)


def test_the_digest_is_what_it_was() -> None:
    """Nodes of one protocol version compare their digests, so another definition is another version."""
    chunk = (torch.arange(4 * 96) * 37 % 251).to(torch.uint8)
    assert chunk_digest(chunk, 96, 12345) == 0x1B2E8C9B67574173


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_flipped_bit_is_found(shape: tuple[int, int], content: str) -> None:
    chunk = make_chunk(shape, content)
    digest, flat = chunk_digest(chunk, shape[1], 7), chunk.view(-1)
    for at in random.Random(0).sample(range(flat.numel()), min(flat.numel(), 150)):
        for bit in range(8):
            flat[at] ^= 1 << bit
            assert chunk_digest(chunk, shape[1], 7) != digest
            flat[at] ^= 1 << bit
    assert chunk_digest(chunk, shape[1], 7) == digest


@pytest.mark.parametrize("content", CONTENTS)
def test_two_flipped_bits_are_found(content: str) -> None:
    """Also the highest bits of two words of one lane, which a sum of words would not see."""
    chunk = make_chunk((2, 256), content)
    words = chunk.view(torch.int64)[0]
    digest = chunk_digest(chunk, 256, 7)
    for one, other in itertools.combinations(range(32), 2):
        for bit in (31, 62, 63):
            flip = 1 << bit if bit < 63 else -(1 << 63)
            words[one] ^= flip
            words[other] ^= flip
            assert chunk_digest(chunk, 256, 7) != digest
            words[one] ^= flip
            words[other] ^= flip


def test_swaps_and_other_seeds_are_found() -> None:
    chunk = make_chunk((4, 960), "random")
    digests = {chunk_digest(chunk, 960, seed) for seed in (0, 1, 2, 1 << 63)}
    for unit in (960, 64, 32, 8, 4):
        for one, other in itertools.combinations(range(min(3840 // unit, 12)), 2):
            swapped = chunk.clone().view(-1, unit)
            swapped[[one, other]] = swapped[[other, one]]
            digests.add(chunk_digest(swapped, 960, 0))
    assert len(digests) == 4 + 6 + 4 * 66


def test_the_length_of_a_slice_counts() -> None:
    zeros = torch.zeros(960, dtype=torch.uint8)
    assert len({chunk_digest(zeros, nbytes, 0) for nbytes in (960, 480, 192)}) == 3
