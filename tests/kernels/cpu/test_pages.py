"""The native page mover against its slow twin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.pages import NativePageMover
from shared.kvcache.page_mover import NumpyPageMover

SHAPES = [  # rows, pages, bytes of a page, distance of the first page from a multiple of 64
    (1, 5, 64, 0),
    (4, 40, 4096, 0),
    (6, 40, 256, 32),  # not aligned for wide stores
    (3, 17, 24, 0),  # no multiple of a vector
    (2, 9, 1, 0),
]
IDS = {
    "one": [3],
    "neighbours": [0, 1, 2, 3, 4],
    "runs": [3, 4, 0, 1, 2],
    "falling": [4, 3, 2, 1],
    "none": [],
}


@pytest.fixture(scope="module")
def native() -> NativePageMover:
    try:
        return NativePageMover()
    except NativeUnavailable as e:
        pytest.skip(f"NO NATIVE KERNELS: {e}")


def random_pages(rows: int, num_pages: int, nbytes: int, offset: int = 0) -> npt.NDArray[np.void]:
    """Aligned to 64 bytes, but for `offset`."""
    size = rows * num_pages * nbytes
    memory = np.empty(size + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory[start : start + size] = np.random.default_rng(0).integers(0, 256, size)
    return memory[start : start + size].view(np.dtype((np.void, nbytes))).reshape(rows, num_pages)


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_and_numpy_agree(
    native: NativePageMover, shape: tuple[int, int, int, int], ids: list[int]
) -> None:
    rows, num_pages, nbytes, offset = shape
    pages = random_pages(*shape)
    gathered = [random_pages(rows, len(ids), nbytes) for _ in range(2)]
    for mover, out in zip((native, NumpyPageMover()), gathered, strict=True):
        mover.gather(pages, ids, out)
    assert gathered[0].tobytes() == gathered[1].tobytes()

    src = random_pages(rows, len(ids), nbytes, offset=1)
    scattered = [random_pages(rows, num_pages, nbytes, offset) for _ in range(2)]
    for mover, into in zip((native, NumpyPageMover()), scattered, strict=True):
        mover.scatter(into, ids, src)
    assert scattered[0].tobytes() == scattered[1].tobytes()
