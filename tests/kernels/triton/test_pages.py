"""Gather and scatter against copies by indexing, and their digests against `chunk_digest`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shared.kernels.triton.pages import TritonPageMover
from shared.kvcache.page_digest import chunk_digest
from tests.device import device

pytestmark = pytest.mark.usefixtures("on_device")

SHAPES = [  # rows, pages, bytes of a page
    (1, 5, 64),
    (4, 12, 4096),  # exactly one step of a program
    (3, 9, 24),  # less than a line
    (2, 9, 8),
    (2, 7, 4104),  # one word more than a step
    (3, 6, 9600),
    (3, 7, 1000),
]
SEED = 2**64 - 59
IDS = {"scattered": [4, 0, 3], "none": []}


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator(device()).manual_seed(math.prod(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


class Mover(TritonPageMover):
    """Waits for each copy, and before it for what the test has queued, which the mover leaves to its caller."""

    def gather(self, *args: Any) -> int:
        settle()
        gather = super().gather(*args)
        return gather if isinstance(gather, int) else gather.wait()

    def scatter(self, *args: Any) -> int:
        settle()
        return super().scatter(*args)


def settle() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mover_copies_and_digests(shape: tuple[int, int, int], ids: list[int]) -> None:
    rows, mover = range(shape[0] // 3, shape[0]), Mover(device())
    pages_RPN = random_bytes(*shape)
    before = pages_RPN.clone()
    expected = pages_RPN[rows.start :, ids].flatten()
    for seed in (None, SEED):
        out = torch.zeros(expected.numel(), dtype=torch.uint8)
        digest = mover.gather(pages_RPN, rows, ids, out, seed)
        assert torch.equal(out, expected)
        assert torch.equal(pages_RPN, before)
        assert digest == (0 if seed is None else chunk_digest(expected, shape[2], seed))

    src = random_bytes(len(rows), len(ids), shape[2])
    before[rows.start :, ids] = src
    for seed in (None, SEED):
        into = random_bytes(*shape)
        digest = mover.scatter(into, rows, ids, src, seed)
        assert torch.equal(into, before)
        assert digest == (0 if seed is None else chunk_digest(src, shape[2], seed))


def test_a_flipped_bit_anywhere_changes_the_digest() -> None:
    mover, pages_RPN = Mover(device()), random_bytes(1, 2, 520)
    out = torch.zeros(520, dtype=torch.uint8)
    whole = mover.gather(pages_RPN, range(1), [1], out, SEED)
    for byte in (0, 7, 63, 64, 511, 512, 519):
        pages_RPN[0, 1, byte] ^= 16
        assert mover.gather(pages_RPN, range(1), [1], out, SEED) != whole
        pages_RPN[0, 1, byte] ^= 16
    assert mover.gather(pages_RPN, range(1), [1], out, SEED) == whole


@pytest.mark.parametrize("no_page", [-1, 5])
def test_a_page_that_is_not_there_is_an_error_and_nothing_is_copied(no_page: int) -> None:
    mover, pages_RPN = Mover(device()), random_bytes(2, 5, 64)
    slot, before = torch.zeros(2, 2, 64, dtype=torch.uint8), pages_RPN.clone()
    with pytest.raises(IndexError):
        mover.gather(pages_RPN, range(2), [1, no_page], slot)
    with pytest.raises(IndexError):
        mover.scatter(pages_RPN, range(2), [1, no_page], slot)
    assert not slot.any()
    assert torch.equal(pages_RPN, before)
    mover.gather(pages_RPN, range(2), [1, 2], slot)
    assert torch.equal(slot, pages_RPN[:, [1, 2]])


def test_a_second_gather_begins_before_the_first_was_waited_for() -> None:
    settle()
    mover, pages_RPN = TritonPageMover(device()), random_bytes(2, 5, 64)
    slots = [torch.zeros(2, 2, 64, dtype=torch.uint8) for _ in range(2)]
    ids = [[1, 2], [4, 0]]
    settle()
    gathers = [mover.gather(pages_RPN, range(2), *of, SEED) for of in zip(ids, slots, strict=True)]
    for gather, page_ids, slot in zip(gathers, ids, slots, strict=True):
        assert not isinstance(gather, int)
        assert gather.wait() == chunk_digest(slot, 64, SEED)
        assert torch.equal(slot, pages_RPN[:, page_ids])
    mover.gather(pages_RPN, range(2), [1, 2], slots[0], SEED)
    assert len(mover._idle) == 1, "what a gather needs beside its slot is used again"
