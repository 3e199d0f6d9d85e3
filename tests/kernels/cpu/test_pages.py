"""The native page mover against its slow twin."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.pages import NativePageMover
from shared.kvcache.page_mover import NumpyPageMover

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
def test_native_and_numpy_agree(
    native: NativePageMover, shape: tuple[int, int, int, int], ids: list[int]
) -> None:
    *RPN, offset = shape
    rows = range(RPN[0] // 3, RPN[0])
    pages_RPN = random_bytes((*RPN,), offset)
    before = pages_RPN.clone()
    gathered = [torch.zeros(len(rows) * len(ids) * RPN[2], dtype=torch.uint8) for _ in range(2)]
    for mover, out in zip((native, NumpyPageMover()), gathered, strict=True):
        mover.gather(pages_RPN, rows, ids, out)
    assert torch.equal(gathered[0], pages_RPN[rows.start :, ids].flatten())
    assert torch.equal(gathered[0], gathered[1])
    assert torch.equal(pages_RPN, before)

    src = random_bytes((len(rows), len(ids), RPN[2]), offset=1)
    scattered = [random_bytes((*RPN,), offset) for _ in range(2)]
    for mover, into in zip((native, NumpyPageMover()), scattered, strict=True):
        mover.scatter(into, rows, ids, src)
    before[rows.start :, ids] = src
    assert torch.equal(scattered[0], before)
    assert torch.equal(scattered[0], scattered[1])


@given(st.data())
def test_native_copies_whatever_the_sizes(native: NativePageMover, data: st.DataObject) -> None:
    num_rows, num_pages, nbytes = (data.draw(st.integers(1, most)) for most in (4, 12, 1300))
    pages_RPN = random_bytes((num_rows, num_pages, nbytes), data.draw(st.sampled_from((0, 0, 16, 61))))
    start = data.draw(st.integers(0, num_rows - 1))
    rows = range(start, data.draw(st.integers(start, num_rows)))
    ids = data.draw(st.lists(st.integers(0, num_pages - 1), unique=True))
    guarded = torch.zeros(len(rows) * len(ids) * nbytes + 2, dtype=torch.uint8)
    slot = guarded[1:-1]
    native.gather(pages_RPN, rows, ids, slot)
    assert torch.equal(slot, pages_RPN[rows.start : rows.stop][:, ids].flatten())
    assert guarded[0] == guarded[-1] == 0
    after = pages_RPN.clone()
    after[rows.start : rows.stop, ids] = 255 - after[rows.start : rows.stop, ids]
    native.scatter(pages_RPN, rows, ids, 255 - slot)
    assert torch.equal(pages_RPN, after)


@pytest.mark.parametrize("no_page", [-1, 5])
def test_a_page_that_is_not_there_is_an_error_and_nothing_is_copied(
    native: NativePageMover, no_page: int
) -> None:
    pages_RPN, slot = random_bytes((2, 5, 64)), torch.zeros((2, 2, 64), dtype=torch.uint8)
    before = pages_RPN.clone()
    for mover in (native, NumpyPageMover()):
        with pytest.raises(IndexError):
            mover.gather(pages_RPN, range(2), [1, no_page], slot)
        with pytest.raises(IndexError):
            mover.scatter(pages_RPN, range(2), [1, no_page], slot)
    assert not slot.any()
    assert torch.equal(pages_RPN, before)
