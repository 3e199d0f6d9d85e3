"""Paged attention against a dense softmax in float64, one head and one query at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from shared.kernels.reference import decode_attention, extend_attention, write_kv

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    seq_lens: tuple[int, ...]
    H: int
    K: int
    D: int
    page_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"B{len(self.seq_lens)}-S{max(self.seq_lens)}-H{self.H}-K{self.K}-D{self.D}"
            f"-page{self.page_size}-{dtype}"
        )


HEADS = [(1, 1, 8), (4, 4, 16), (4, 2, 32), (6, 1, 24), (9, 3, 40)]
LENGTHS = [(1,), (77, 5), (16, 1, 33), (3, 48, 47, 49, 2)]
SHAPES = [
    *(Shape(LENGTHS[1], H, K, D, 16, torch.float32) for H, K, D in HEADS),
    *(Shape(lens, 4, 2, 32, page, torch.float32) for lens in LENGTHS for page in (1, 3, 16)),
    *(Shape((77, 5), 4, 2, 32, 3, dtype) for dtype in (torch.float16, torch.bfloat16)),
    *(Shape((16, 1, 33), 6, 1, 24, 16, dtype) for dtype in (torch.float16, torch.bfloat16)),
]
shapes = pytest.mark.parametrize("shape", dict.fromkeys(SHAPES), ids=str)


@dataclass
class PagedKV:
    """Sequences whose pages are scattered over a pool; what no sequence owns is filled with large numbers."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table_BP: torch.Tensor
    k_BTKD: list[torch.Tensor]
    v_BTKD: list[torch.Tensor]


def paged(shape: Shape, generator: torch.Generator) -> PagedKV:
    S = shape.page_size
    num_pages = [-(-length // S) for length in shape.seq_lens]
    pages = torch.full((sum(num_pages) + 3, shape.K, S, shape.D), 50.0, dtype=shape.dtype)
    shuffled = (1 + torch.randperm(len(pages) - 1, generator=generator)).tolist()
    table = torch.zeros(
        len(shape.seq_lens), max(num_pages) + 1, dtype=torch.int64
    )  # padded with the scratch page
    for b, count in enumerate(num_pages):
        table[b, :count] = torch.tensor([shuffled.pop() for _ in range(count)])
    k, v = (
        [randn(shape, generator, length, shape.K, shape.D) for length in shape.seq_lens] for _ in range(2)
    )
    kv = PagedKV(pages.clone(), pages.clone(), table, k, v)
    for b, length in enumerate(shape.seq_lens):
        put(kv, b, 0, length)
    return kv


def put(kv: PagedKV, b: int, start: int, end: int) -> None:
    S = kv.k_pages.shape[2]
    positions = torch.arange(start, end)
    pages_T = kv.page_table_BP[b, positions // S]
    write_kv(kv.k_pages, kv.v_pages, kv.k_BTKD[b][start:end], kv.v_BTKD[b][start:end], pages_T, positions % S)


def randn(shape: Shape, generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator).to(shape.dtype)


def naive_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    start: int,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Query t of the result is token start + t; K head h // (H / K) serves query head h."""
    T, H, D = q_THD.shape
    group = H // k_TKD.shape[1]
    out_THD = torch.zeros(T, H, D, dtype=torch.float64)
    for t in range(T):
        for h in range(H):
            seen = slice(0 if window is None else max(start + t + 1 - window, 0), start + t + 1)
            k_SD, v_SD = k_TKD[seen, h // group].double(), v_TKD[seen, h // group].double()
            weights_S = torch.exp(k_SD @ q_THD[t, h].double() / D**0.5)
            sink = 0.0 if sinks_H is None else torch.exp(sinks_H[h].double())
            out_THD[t, h] = weights_S @ v_SD / (weights_S.sum() + sink)
    return out_THD


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@shapes
def test_decode_attention(shape: Shape) -> None:
    generator = torch.Generator().manual_seed(1)
    kv = paged(shape, generator)
    q_BHD = randn(shape, generator, len(shape.seq_lens), shape.H, shape.D)
    out = decode_attention(q_BHD, kv.k_pages, kv.v_pages, kv.page_table_BP, torch.tensor(shape.seq_lens))
    expected = torch.cat(
        [
            naive_attention(q_BHD[b : b + 1], kv.k_BTKD[b], kv.v_BTKD[b], length - 1)
            for b, length in enumerate(shape.seq_lens)
        ]
    )
    assert_close(out, expected, shape.dtype)


@shapes
@pytest.mark.parametrize("cached", ["nothing", "all but one", "half", "mixed"])
def test_extend_attention(shape: Shape, cached: str) -> None:
    generator = torch.Generator().manual_seed(2)
    kv = paged(shape, generator)
    starts = [cached_len(cached, b, length) for b, length in enumerate(shape.seq_lens)]
    lengths = [length - start for length, start in zip(shape.seq_lens, starts, strict=True)]
    q_THD = randn(shape, generator, sum(lengths), shape.H, shape.D)
    out = extend_attention(q_THD, kv.k_pages, kv.v_pages, kv.page_table_BP, starts, lengths)
    expected = torch.cat(
        [
            naive_attention(q, kv.k_BTKD[b], kv.v_BTKD[b], starts[b])
            for b, q in enumerate(torch.split(q_THD, lengths))
        ]
    )
    assert_close(out, expected, shape.dtype)


def test_extend_attention_does_not_look_ahead() -> None:
    """Tokens behind the chunk may be in the pages already (another sequence's prefix hit); nobody sees them."""
    shape = Shape((40,), 4, 2, 32, 16, torch.float32)
    generator = torch.Generator().manual_seed(3)
    kv = paged(shape, generator)
    q_THD = randn(shape, generator, 10, shape.H, shape.D)
    out = extend_attention(q_THD, kv.k_pages, kv.v_pages, kv.page_table_BP, [20], [10])
    expected = naive_attention(q_THD, kv.k_BTKD[0][:30], kv.v_BTKD[0][:30], 20)
    assert_close(out, expected, shape.dtype)


@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 32, 200])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (6, 2), (3, 1)])
def test_windows_and_sinks(H: int, K: int, has_sinks: bool, window: int | None) -> None:
    """What lies in pages before the window has no influence."""
    shape = Shape((77, 5, 33), H, K, 16, 4, torch.float32)
    generator = torch.Generator().manual_seed(4)
    kv = paged(shape, generator)
    sinks_H = torch.linspace(-2, 3, H) if has_sinks else None
    for starts in ([0, 0, 0], [76, 4, 32], [40, 2, 16]):
        lengths = [seq_len - start for seq_len, start in zip(shape.seq_lens, starts, strict=True)]
        q_THD = randn(shape, generator, sum(lengths), H, 16)
        k_pages, v_pages = kv.k_pages.clone(), kv.v_pages.clone()
        for b, start in enumerate(starts):
            num_pages = 0 if window is None else max(start + 1 - window, 0) // 4
            k_pages[kv.page_table_BP[b, :num_pages]] = torch.nan
            v_pages[kv.page_table_BP[b, :num_pages]] = torch.inf
        pages = k_pages, v_pages, kv.page_table_BP
        outs = [extend_attention(q_THD, *pages, starts, lengths, window, sinks_H)]
        if max(lengths) == 1:
            outs.append(decode_attention(q_THD, *pages, torch.tensor(shape.seq_lens), window, sinks_H))
        expected = torch.cat(
            [
                naive_attention(q, kv.k_BTKD[b], kv.v_BTKD[b], starts[b], window, sinks_H)
                for b, q in enumerate(torch.split(q_THD, lengths))
            ]
        )
        for out in outs:
            assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_write_kv_touches_its_slots_only(page_size: int, dtype: torch.dtype) -> None:
    k_pages, v_pages = (torch.full((7, 2, page_size, 4), fill, dtype=dtype) for fill in (3.0, 4.0))
    pages_T, offsets_T = torch.tensor([5, 2, 5]), torch.tensor([0, page_size - 1, page_size // 2])
    if page_size == 1:
        pages_T[2] = 6
    k_TKD, v_TKD = (torch.randn(3, 2, 4).to(dtype) for _ in range(2))
    write_kv(k_pages, v_pages, k_TKD, v_TKD, pages_T, offsets_T)
    for pages, new_TKD, fill in ((k_pages, k_TKD, 3.0), (v_pages, v_TKD, 4.0)):
        expected = torch.full_like(pages, fill)
        for t in range(3):
            for head in range(2):
                expected[pages_T[t], head, offsets_T[t]] = new_TKD[t, head]
        assert torch.equal(pages, expected)


def cached_len(how: str, b: int, length: int) -> int:
    choices: Sequence[int] = (0, length - 1, length // 2)
    return {"nothing": choices[0], "all but one": choices[1], "half": choices[2], "mixed": choices[b % 3]}[
        how
    ]


def test_what_an_earlier_owner_left_behind_a_sequence_does_not_matter() -> None:
    """The rest of the last page, and padded page-table entries, may hold NaN: 0 * NaN would be NaN."""
    generator = torch.Generator().manual_seed(3)
    k_pages, v_pages = (torch.randn(6, 2, 4, 8, generator=generator) for _ in range(2))
    q = torch.randn(2, 4, 8, generator=generator)
    page_table = torch.tensor([[1, 2], [3, 4]])
    seq_lens = torch.tensor([3, 6])
    clean = decode_attention(q, k_pages, v_pages, page_table, seq_lens)
    for pages in (k_pages, v_pages):
        pages[1, :, 3] = torch.nan
        pages[2] = torch.inf
        pages[4, :, 2:] = torch.nan
    assert torch.equal(decode_attention(q, k_pages, v_pages, page_table, seq_lens), clean)
    assert torch.isfinite(clean).all()
