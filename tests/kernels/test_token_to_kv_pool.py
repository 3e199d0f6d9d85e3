"""Pages that are gathered on one node and scattered on another are the same pages, whatever their type and shape."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.pages import NativePageMover
from shared.kvcache.allocator import PageCopy
from shared.kvcache.host_pool import make_host_pool
from shared.kvcache.page_mover import PageMover, TorchPageMover
from shared.kvcache.pools import TokenToKVPool
from shared.kvcache.windowed_pool import WindowedKVPool
from shared.protocol.messages import kv_row_nbytes

NUM_LAYERS = 4
POOLS = [
    (page_size, dtype, K, D)
    for page_size in (1, 3, 16)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    for K, D in ((2, 32), (1, 3))  # 3 elements of 1 or 2 bytes: pages that are no multiple of 8 bytes
]


@pytest.fixture(scope="module", params=["torch", "native"])
def mover(request: pytest.FixtureRequest) -> PageMover:
    if request.param == "torch":
        return TorchPageMover()
    try:
        return NativePageMover()
    except NativeUnavailable as e:
        pytest.skip(f"NO NATIVE KERNELS: {e}")


def make_pool(
    mover: PageMover, page_size: int, dtype: torch.dtype, K: int, D: int, num_pages: int = 9
) -> TokenToKVPool:
    return TokenToKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=K,
        head_dim=D,
        dtype=dtype,
        device=torch.device("cpu"),
        mover=mover,
    )


def fill(pool: TokenToKVPool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = pool.buffer_LSNHPD.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def raw_pages(pool: TokenToKVPool) -> torch.Tensor:
    """[layer, K or V, page, bytes]."""
    return pool.buffer_LSNHPD.flatten(3).view(torch.uint8)


@pytest.mark.parametrize(("page_size", "dtype", "K", "D"), POOLS)
@pytest.mark.parametrize("layers", [(0, NUM_LAYERS), (1, 2), (3, 1)], ids=str)
def test_round_trip(
    mover: PageMover, page_size: int, dtype: torch.dtype, K: int, D: int, layers: tuple[int, int]
) -> None:
    source, target = (make_pool(mover, page_size, dtype, K, D) for _ in range(2))
    fill(source, 1)
    fill(target, 2)
    before = raw_pages(target).clone()
    from_pages, to_pages = [7, 1, 4], [2, 8, 3]
    first, count = layers
    out = torch.empty(source.gather_nbytes(3, count), dtype=torch.uint8)
    gathered = source.gather(from_pages, first, count, out, seed=5)
    assert target.scatter(to_pages, first, count, out, seed=5) == gathered
    assert target.scatter(to_pages, first, count, out, seed=6) != gathered
    expected = before
    expected[first : first + count, :, to_pages] = raw_pages(source)[first : first + count, :, from_pages]
    assert torch.equal(raw_pages(target), expected)


def test_a_gather_is_layer_major_with_k_before_v(mover: PageMover) -> None:
    pool = make_pool(mover, 3, torch.float32, 2, 8)
    fill(pool, 3)
    out = torch.empty(pool.gather_nbytes(2, 2), dtype=torch.uint8)
    pool.gather([5, 2], 1, 2, out)
    parts = [raw_pages(pool)[layer, kv, page] for layer in (1, 2) for kv in (0, 1) for page in (5, 2)]
    assert torch.equal(out, torch.cat(parts))


def test_sizes_are_exact(mover: PageMover) -> None:
    pool = make_pool(mover, 16, torch.bfloat16, 2, 32)
    assert pool.page_nbytes == 16 * 2 * 32 * 2
    assert pool.gather_nbytes(5, 3) == 2 * 3 * 5 * pool.page_nbytes
    k, v = pool.layer_kv(2)
    assert k.shape == v.shape == (9, 2, 16, 32)
    assert k.data_ptr() != v.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_page_has_the_bytes_that_nodes_count(mover: PageMover, dtype: str) -> None:
    pool = make_pool(mover, 16, getattr(torch, dtype), 2, 32)
    assert pool.page_nbytes == 16 * 2 * kv_row_nbytes(32, dtype)


def test_a_head_range_of_a_page_is_contiguous(mover: PageMover) -> None:
    pool = make_pool(mover, 16, torch.float32, 4, 8)
    k, _ = pool.layer_kv(1)
    assert k[3].is_contiguous()
    assert k[3, 1:3].is_contiguous()


def test_layer_views_write_into_the_gathered_pages(mover: PageMover) -> None:
    pool = make_pool(mover, 1, torch.float32, 1, 2)
    pool.layer_kv(3)[1][5] = 7.0
    out = torch.empty(pool.gather_nbytes(1, 1), dtype=torch.uint8)
    pool.gather([5], 3, 1, out)
    assert out.view(torch.float32).tolist() == [0.0, 0.0, 7.0, 7.0]


@pytest.mark.parametrize("page", [-1, 9])
def test_a_page_that_is_not_there_is_neither_read_nor_written(mover: PageMover, page: int) -> None:
    pool = make_pool(mover, 3, torch.float32, 1, 3)
    fill(pool, 1)
    before, slot = raw_pages(pool).clone(), torch.full((pool.gather_nbytes(2, 1),), 5, dtype=torch.uint8)
    with pytest.raises(IndexError, match="9"):
        pool.gather([1, page], 0, 1, slot)
    assert (slot == 5).all()
    with pytest.raises(IndexError, match="9"):
        pool.scatter([1, page], 0, 1, slot)
    assert torch.equal(raw_pages(pool), before)


SOME_WINDOWS = pytest.mark.parametrize(
    "has_window", [(True, False, True, True), (True, True)], ids=["some", "every"]
)


def windowed_pool(mover: PageMover, has_window: tuple[bool, ...]) -> WindowedKVPool:
    """Eight pages and four window pages, beside the scratch pages. Each element is the number of its layer."""
    num_windows = sum(has_window)
    full, window = (
        TokenToKVPool(
            num_pages=num_pages,
            page_size=4,
            num_layers=num_layers,
            num_kv_heads=2,
            head_dim=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
            mover=mover,
        )
        for num_pages, num_layers in ((9, len(has_window) - num_windows), (5, num_windows))
    )
    pool = WindowedKVPool(full, window, has_window)
    for layer in range(pool.num_layers):
        for pages in pool.layer_kv(layer):
            pages.fill_(layer)
    return pool


@SOME_WINDOWS
def test_layers_with_windows_have_their_own_pages(mover: PageMover, has_window: tuple[bool, ...]) -> None:
    """A transfer numbers layers group by group. No copy has layers of both, and none writes to the other group."""
    pool, num_windows = windowed_pool(mover, has_window), sum(has_window)
    num_full = len(has_window) - num_windows
    slot = torch.empty(pool.gather_nbytes(2, num_windows), dtype=torch.uint8)
    digest = pool.gather([4, 1], num_full, num_windows, slot, seed=7)
    layers = [layer for layer, windowed in enumerate(has_window) if windowed]
    assert slot.view(torch.float32).view(num_windows, -1).unique(dim=1).flatten().tolist() == layers
    assert pool.scatter([2, 3], num_full, num_windows, slot, seed=7) == digest
    for layer in range(pool.num_layers):
        assert all((pages == layer).all() for pages in pool.layer_kv(layer))
    with pytest.raises(IndexError):
        pool.gather([5, 1], num_full, num_windows, slot)
    if num_full:
        with pytest.raises(AssertionError, match="of both groups"):
            pool.gather([1], 0, pool.num_layers, torch.empty(pool.gather_nbytes(1, 4), dtype=torch.uint8))


@SOME_WINDOWS
def test_a_host_page_has_the_layers_of_both_groups(mover: PageMover, has_window: tuple[bool, ...]) -> None:
    """Page 8 with window page 4, and page 7 without one, though no window page has such a number."""
    pool = windowed_pool(mover, has_window)
    host = make_host_pool(pool, 2)
    assert host is not None
    host.copy(PageCopy(True, (8, 7), (0, 1), (4, 0)))
    for layer in range(pool.num_layers):
        for pages in pool.layer_kv(layer):
            pages.fill_(-1)
    host.copy(PageCopy(False, (3, 4), (0, 1), (2, 0)))
    for layer, windowed in enumerate(has_window):
        for pages in pool.layer_kv(layer):
            restored = [page for page in range(len(pages)) if (pages[page] == layer).all()]
            assert restored == ([2] if windowed else [3, 4])
