"""The page movers against the definition of a copy, and their digests against `chunk_digest`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.pages import NativePageMover
from shared.kvcache.page_digest import chunk_digest
from shared.kvcache.page_mover import TorchPageMover

SHAPES = [  # rows, pages, bytes of a page, distance of the first page from a multiple of 64
    (1, 5, 64, 0),
    (4, 40, 4096, 0),
    (6, 40, 256, 32),  # not aligned for wide stores
    (3, 17, 24, 0),  # no multiple of a vector
    (2, 9, 1, 0),
    (5, 13, 16384, 0),  # several pages at once, in many steps
    (3, 11, 960, 0),  # a page of no whole number of steps
    (3, 11, 960, 16),
    (3, 7, 1000, 0),
]
SEED = 2**64 - 59
IDS = {
    "one": [3],
    "neighbours": [0, 1, 2, 3, 4],
    "runs": [3, 4, 0, 1, 2],
    "falling": [4, 3, 2, 1],
    "scattered": [4, 0, 3],
    "none": [],
}


@pytest.fixture(scope="module")
def native() -> NativePageMover:
    try:
        return NativePageMover()
    except NativeUnavailable as e:
        pytest.skip(f"NO NATIVE KERNELS: {e}")


def random_bytes(shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """Aligned to 64 bytes, but for `offset`."""
    nbytes = math.prod(shape)
    memory = torch.randint(
        0, 256, (nbytes + 128,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)
    )
    start = -memory.data_ptr() % 64 + offset
    return memory[start : start + nbytes].view(shape)


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_movers_agree(native: NativePageMover, shape: tuple[int, int, int, int], ids: list[int]) -> None:
    *RPN, offset = shape
    rows = range(RPN[0] // 3, RPN[0])
    pages_RPN = random_bytes((*RPN,), offset)
    before = pages_RPN.clone()
    expected = pages_RPN[rows.start :, ids].flatten()
    for mover in (native, TorchPageMover()):
        for seed in (None, SEED):
            out = torch.zeros(len(rows) * len(ids) * RPN[2], dtype=torch.uint8)
            digest = mover.gather(pages_RPN, rows, ids, out, seed)
            assert torch.equal(out, expected)
            assert torch.equal(pages_RPN, before)
            assert digest == (0 if seed is None else chunk_digest(expected, RPN[2], seed))

    src = random_bytes((len(rows), len(ids), RPN[2]))
    before[rows.start :, ids] = src
    for mover in (native, TorchPageMover()):
        for seed in (None, SEED):
            into = random_bytes((*RPN,), offset)
            digest = mover.scatter(into, rows, ids, src, seed)
            assert torch.equal(into, before)
            assert digest == (0 if seed is None else chunk_digest(src, RPN[2], seed))


def test_a_native_slot_may_begin_anywhere(native: NativePageMover) -> None:
    pages_RPN, src = random_bytes((2, 9, 960)), random_bytes((2, 3, 960), offset=1)
    digest = native.scatter(pages_RPN, range(2), [8, 1, 4], src, SEED)
    assert torch.equal(pages_RPN[:, [8, 1, 4]], src)
    assert digest == chunk_digest(src.clone(), 960, SEED)


@given(st.data())
def test_native_copies_whatever_the_sizes(native: NativePageMover, data: st.DataObject) -> None:
    num_rows, num_pages, nbytes = (data.draw(st.integers(1, most)) for most in (4, 12, 1300))
    pages_RPN = random_bytes((num_rows, num_pages, nbytes), data.draw(st.sampled_from((0, 0, 16, 61))))
    start = data.draw(st.integers(0, num_rows - 1))
    rows = range(start, data.draw(st.integers(start, num_rows)))
    ids = data.draw(st.lists(st.integers(0, num_pages - 1), unique=True))
    guarded = torch.zeros(len(rows) * len(ids) * nbytes + 2, dtype=torch.uint8)
    slot = guarded[1:-1]
    digest = native.gather(pages_RPN, rows, ids, slot, SEED)
    assert torch.equal(slot, pages_RPN[rows.start : rows.stop][:, ids].flatten())
    assert digest == chunk_digest(slot.clone(), nbytes, SEED)
    assert guarded[0] == guarded[-1] == 0
    after = pages_RPN.clone()
    after[rows.start : rows.stop, ids] = 255 - after[rows.start : rows.stop, ids]
    digest = native.scatter(pages_RPN, rows, ids, 255 - slot, SEED)
    assert torch.equal(pages_RPN, after)
    assert digest == chunk_digest(255 - slot, nbytes, SEED)


@pytest.mark.parametrize("no_page", [-1, 5])
def test_a_page_that_is_not_there_is_an_error_and_nothing_is_copied(
    native: NativePageMover, no_page: int
) -> None:
    pages_RPN, slot = random_bytes((2, 5, 64)), torch.zeros((2, 2, 64), dtype=torch.uint8)
    before = pages_RPN.clone()
    for mover in (native, TorchPageMover()):
        with pytest.raises(IndexError):
            mover.gather(pages_RPN, range(2), [1, no_page], slot)
        with pytest.raises(IndexError):
            mover.scatter(pages_RPN, range(2), [1, no_page], slot)
    assert not slot.any()
    assert torch.equal(pages_RPN, before)
