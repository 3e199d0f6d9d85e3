"""Native attention against the torch twins in float64, within the bound of bf16 weights and a bf16 result.

Products with K are exact in float32 and so are those with V, up to sums in float32. What is rounded to bf16 (unit
roundoff u = 2^-8) are the softmax weights w, which moves a result by at most u * sum(w |v|), and the result itself,
by u * |result|. SLACK covers the rest, below 0.05 u = 1.9e-4 of sum(w |v|) + |result|: powers of two, which are
computed to 7.5e-5 (in the weights and in what they are divided by), and sums in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from shared.kernels import reference
from shared.kernels.cpu.library import Team
from shared.kernels.row_codes import quantize_rows, split_codes
from tests.kernels.cpu.attention import decode_attention, extend_attention

U = 2.0**-8
SLACK = 1.05


@dataclass(frozen=True)
class Shape:
    seq_lens: tuple[int, ...]
    H: int
    K: int
    D: int
    page_size: int

    def __str__(self) -> str:
        return f"B{len(self.seq_lens)}-S{max(self.seq_lens)}-H{self.H}-K{self.K}-D{self.D}-P{self.page_size}"


SHAPES = [
    Shape((1,), 1, 1, 16, 1),
    Shape((5, 777), 8, 2, 128, 16),
    Shape((64, 63, 65, 1, 128, 129), 12, 12, 64, 16),
    Shape((130, 17), 3, 1, 80, 7),
    Shape((513, 512), 2, 2, 48, 64),
    Shape((200, 3), 6, 3, 96, 1),
    Shape((600,), 7, 1, 64, 256),
    Shape((90, 260), 9, 1, 256, 32),
    Shape((33, 70), 5, 1, 112, 128),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("codes", [False, True], ids=["bf16", "int8"])


@dataclass
class PagedKV:
    """Sequences whose pages are scattered over a pool; whatever no sequence owns is NaN in K, inf in V."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table_BP: torch.Tensor

    def finite(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the twins take: float64, and finite where nobody must look."""
        k, v = (values_of(x).nan_to_num(0.0, 0.0, 0.0) for x in (self.k_pages, self.v_pages))
        return k, v, self.page_table_BP.long()


def values_of(pages: torch.Tensor) -> torch.Tensor:
    """In float64."""
    if pages.dtype != torch.int8:
        return pages.double()
    codes, scales = split_codes(pages)
    return codes.double() * scales[..., None].double()


def as_codes(pages: torch.Tensor) -> torch.Tensor:
    """Pages of int8: scales are NaN and infinite where the values are."""
    N, K, S, D = pages.shape
    coded = torch.empty(N, K, S, D + 4, dtype=torch.int8)
    for to, new in zip(split_codes(coded), quantize_rows(pages), strict=True):
        to.copy_(new)
    return coded


def paged(shape: Shape, generator: torch.Generator, *, codes: bool = False) -> PagedKV:
    B, S = len(shape.seq_lens), shape.page_size
    P = -(-max(shape.seq_lens) // S)
    size = (B * P + 2, shape.K, S, shape.D)
    k, v = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
    table_BP = torch.randperm(B * P + 2, generator=generator)[: B * P].view(B, P)
    owned = torch.zeros(B * P + 2, S, dtype=torch.bool)
    for b, length in enumerate(shape.seq_lens):
        positions = torch.arange(length)
        owned[table_BP[b, positions // S], positions % S] = True
        k[table_BP[b, (length - 1) // S], :, (length - 1) % S] = 0.0  # of codes, its scale too
    k.transpose(1, 2)[~owned] = float("nan")
    v.transpose(1, 2)[~owned] = float("inf")
    return PagedKV(*((as_codes(x) for x in (k, v)) if codes else (k, v)), table_BP.int())


def queries(shape: Shape, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Some heads look at few tokens, so that not every weight is small."""
    sharpness_H = torch.linspace(0.5, 4, shape.H)[:, None]
    return (torch.randn(num_tokens, shape.H, shape.D, generator=generator) * sharpness_H).bfloat16()


def assert_within_rounding(actual: torch.Tensor, expected: torch.Tensor, magnitudes: torch.Tensor) -> None:
    """`magnitudes` is what attention makes of |v|."""
    assert actual.dtype == torch.bfloat16
    error = (actual.double() - expected).abs()
    bound = SLACK * U * (magnitudes + expected.abs())
    assert (error <= bound).all(), f"{(error / bound).max():.3f} of the bound"


@dtypes
@shapes
def test_decode_attention(team: Team, shape: Shape, codes: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    kv = paged(shape, generator, codes=codes)
    q_BHD = queries(shape, len(shape.seq_lens), generator)
    out = decode_attention(team, q_BHD, kv.k_pages, kv.v_pages, kv.page_table_BP, shape.seq_lens)
    k, v, table_BP = kv.finite()
    seq_lens_B = torch.tensor(shape.seq_lens)
    expected, magnitudes = (
        reference.decode_attention(q_BHD.double(), k, x, table_BP, seq_lens_B) for x in (v, v.abs())
    )
    assert_within_rounding(out, expected, magnitudes)


@dtypes
@shapes
@pytest.mark.parametrize("cached", ["nothing", "mixed"])
def test_extend_attention(team: Team, shape: Shape, cached: str, codes: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    kv = paged(shape, generator, codes=codes)
    starts = [cached_len(cached, b, length) for b, length in enumerate(shape.seq_lens)]
    lengths = [length - start for length, start in zip(shape.seq_lens, starts, strict=True)]
    q_THD = queries(shape, sum(lengths), generator)
    out = extend_attention(team, q_THD, kv.k_pages, kv.v_pages, kv.page_table_BP, starts, lengths)
    k, v, table_BP = kv.finite()
    expected, magnitudes = (
        reference.extend_attention(q_THD.double(), k, x, table_BP, starts, lengths) for x in (v, v.abs())
    )
    assert_within_rounding(out, expected, magnitudes)


def cached_len(cached: str, b: int, length: int) -> int:
    """`mixed` has sequences of one new token and of none."""
    return [2 * length // 3, length - 1, 0, length][b % 4] if cached == "mixed" else 0


SHAPE = Shape((700, 40, 1, 513, 128, 1500), 6, 2, 64, 16)


def test_decode_does_not_depend_on_the_batch_or_the_team(library: ctypes.CDLL, team: Team) -> None:
    generator = torch.Generator().manual_seed(3)
    kv = paged(SHAPE, generator)
    q_BHD = queries(SHAPE, len(SHAPE.seq_lens), generator)
    together = decode_attention(team, q_BHD, kv.k_pages, kv.v_pages, kv.page_table_BP, SHAPE.seq_lens)
    for num_threads in (1, 3):
        other = Team(library, [0] * num_threads)
        for b, seq_len in enumerate(SHAPE.seq_lens):
            row = slice(b, b + 1)
            alone = decode_attention(
                other, q_BHD[row], kv.k_pages, kv.v_pages, kv.page_table_BP[row], [seq_len]
            )
            assert torch.equal(alone, together[row]), (num_threads, seq_len)
        other.close()


@pytest.mark.parametrize("chunk", [1, 37, 64, 200])
def test_extend_does_not_depend_on_chunks_batch_or_team(library: ctypes.CDLL, team: Team, chunk: int) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = Shape((300, 70, 129), 6, 2, 64, 16)
    kv = paged(shape, generator)
    whole = [queries(shape, seq_len, generator) for seq_len in shape.seq_lens]
    zeros = [0] * len(whole)
    together = extend_attention(
        team, torch.cat(whole), kv.k_pages, kv.v_pages, kv.page_table_BP, zeros, shape.seq_lens
    )
    other = Team(library, [0] * 3)
    for b, expected_THD in enumerate(together.split(shape.seq_lens)):
        alone = in_chunks(other if b % 2 else team, whole[b], kv, b, chunk)
        assert torch.equal(alone, expected_THD)
    other.close()


def in_chunks(
    team: Team,
    q_THD: torch.Tensor,
    kv: PagedKV,
    b: int,
    chunk: int,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence, `chunk` tokens at a time; what is not computed yet, or before its window, is not in the pages."""
    page_size = kv.k_pages.shape[2]
    k_pages, v_pages = torch.full_like(kv.k_pages, float("nan")), torch.full_like(kv.v_pages, float("inf"))
    parts = []
    for start in range(0, len(q_THD), chunk):
        hide(PagedKV(k_pages, v_pages, kv.page_table_BP), b, start, window)
        positions = torch.arange(start, min(start + chunk, len(q_THD)))
        at = kv.page_table_BP[b, positions // page_size].long(), slice(None), positions % page_size
        k_pages[at], v_pages[at] = kv.k_pages[at], kv.v_pages[at]
        q = q_THD[start : start + chunk]
        pages = k_pages, v_pages, kv.page_table_BP[b : b + 1]
        parts.append(extend_attention(team, q, *pages, [start], [len(q)], window, sinks_H))
    return torch.cat(parts)


def hide(kv: PagedKV, b: int, position: int, window: int | None) -> None:
    """Fill the pages that end before the window of a token with NaN and inf."""
    num_hidden = 0 if window is None else max(position + 1 - window, 0) // kv.k_pages.shape[2]
    pages = kv.page_table_BP[b, :num_hidden].long()
    for x, value in ((kv.k_pages, torch.nan), (kv.v_pages, torch.inf)):
        (x if x.dtype == torch.bfloat16 else split_codes(x)[1])[pages] = value


@pytest.mark.parametrize(
    ("heads", "window", "has_sinks"),
    [
        ((3, 1, 80, 5), None, True),
        ((3, 1, 80, 5), 1, True),
        ((2, 2, 64, 16), 16, False),
        ((6, 2, 64, 16), 63, True),
        ((3, 1, 80, 5), 64, False),
        ((4, 1, 128, 16), 65, True),
        ((3, 1, 80, 5), 512, False),
        ((4, 2, 64, 16), 513, True),
    ],
)
@dtypes
def test_windows_and_sinks(
    library: ctypes.CDLL,
    team: Team,
    heads: tuple[int, int, int, int],
    window: int | None,
    has_sinks: bool,
    codes: bool,
) -> None:
    """Near the twins, and the same bits from decode steps, prefills and chunks, alone or together, on any team."""
    w = window or 300
    shape = Shape((w, w + 1, max(w - 1, 1), 2 * w, 700), *heads)
    generator = torch.Generator().manual_seed(w)
    kv = paged(shape, generator, codes=codes)
    k, v, table_BP = kv.finite()
    q_THD = queries(shape, sum(shape.seq_lens), generator)
    sinks_H = torch.tensor([-200.0, *torch.linspace(-3, 8, shape.H - 1)]) if has_sinks else None
    zeros, lens_B = [0] * len(shape.seq_lens), torch.tensor(shape.seq_lens)
    pages = kv.k_pages, kv.v_pages, kv.page_table_BP
    extended = extend_attention(team, q_THD, *pages, zeros, shape.seq_lens, window, sinks_H)
    expected, magnitudes = (
        reference.extend_attention(q_THD.double(), k, x, table_BP, zeros, shape.seq_lens, window, sinks_H)
        for x in (v, v.abs())
    )
    assert_within_rounding(extended, expected, magnitudes)

    other = Team(library, [0] * 3)
    for b, (q, whole) in enumerate(
        zip(q_THD.split(shape.seq_lens), extended.split(shape.seq_lens), strict=True)
    ):
        rows = sorted({p for p in (0, w - 2, w - 1, w, w + 62, 2 * w, len(q) - 1) if 0 <= p < len(q)})
        table = kv.page_table_BP[b].repeat(len(rows), 1)
        decoded = decode_attention(
            other, q[rows], *pages[:2], table, [row + 1 for row in rows], window, sinks_H
        )
        assert_same_bits(decoded, whole[rows])
        if not codes:
            chunk = [37, 64, 200][b % 3]
            assert_same_bits(in_chunks(other, q, kv, b, chunk, window, sinks_H), whole)
    other.close()

    for b, length in enumerate(shape.seq_lens):
        hide(kv, b, length - 1, window)
    last = lens_B.cumsum(0) - 1
    decoded = decode_attention(team, q_THD[last], *pages, shape.seq_lens, window, sinks_H)
    assert_same_bits(decoded, extended[last])
    expected, magnitudes = (
        reference.decode_attention(q_THD[last].double(), k, x, table_BP, lens_B, window, sinks_H)
        for x in (v, v.abs())
    )
    assert_within_rounding(decoded, expected, magnitudes)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("shape", [*SHAPES, Shape((1100, 70), 5, 1, 64, 16)], ids=str)
@dtypes
def test_decode_and_extend_give_the_same_bits(team: Team, shape: Shape, codes: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    kv = paged(shape, generator, codes=codes)
    q_THD = queries(shape, sum(shape.seq_lens), generator)
    starts = [0] * len(shape.seq_lens)
    pages = kv.k_pages, kv.v_pages
    extended = extend_attention(team, q_THD, *pages, kv.page_table_BP, starts, shape.seq_lens)
    first = 0
    for b, length in enumerate(shape.seq_lens):
        positions = sorted(
            {*range(0, length, 37), *(p for p in (63, 64, 511, 512) if p < length), length - 1}
        )
        rows = [first + position for position in positions]
        table_BP = kv.page_table_BP[b].repeat(len(rows), 1)
        decoded = decode_attention(team, q_THD[rows], *pages, table_BP, [p + 1 for p in positions])
        assert_same_bits(decoded, extended[rows])
        first += length


SPLIT = 512
"""`kSplit` of the kernels."""


@pytest.mark.parametrize("num_splits", [3, 9])
def test_decode_adds_the_splits_of_a_context_in_the_order_of_extend(team: Team, num_splits: int) -> None:
    """The first two cancel out exactly, and are so large that the others are lost in either: every order shows."""
    length = num_splits * SPLIT - 3
    shape = Shape((length,), 4, 2, 64, 16)
    generator = torch.Generator().manual_seed(7)
    kv = paged(shape, generator)
    pages_of_split = kv.page_table_BP[0].long()[: 2 * SPLIT // 16].view(2, -1)
    kv.k_pages[pages_of_split[1]] = kv.k_pages[pages_of_split[0]]
    kv.v_pages[pages_of_split[0]] *= 2.0**14
    kv.v_pages[pages_of_split[1]] = -kv.v_pages[pages_of_split[0]]
    pages = kv.k_pages, kv.v_pages
    first = max(2 * SPLIT, length - SPLIT - 50)
    q_THD = (
        queries(shape, length - first, generator) * 0.25
    )  # so that each split has its share of the weights
    extended = extend_attention(team, q_THD, *pages, kv.page_table_BP, [first], [len(q_THD)])
    rows = [*range(0, len(q_THD), 23), len(q_THD) - 1]
    seq_lens, table_BP = [first + row + 1 for row in rows], kv.page_table_BP.repeat(len(rows), 1)
    decoded = decode_attention(team, q_THD[rows], *pages, table_BP, seq_lens)
    assert_same_bits(decoded, extended[rows])
    k, v, _ = kv.finite()
    small = v.clone()
    small[pages_of_split] = 0.0
    expected, magnitudes = (
        reference.decode_attention(q_THD[rows].double(), k, x, table_BP.long(), torch.tensor(seq_lens))
        for x in (small, small.abs())
    )
    assert_within_rounding(decoded, expected, magnitudes)


@pytest.mark.parametrize("num_hidden", [3, 64, 150])
def test_keys_whose_score_is_minus_infinity_have_no_weight(team: Team, num_hidden: int) -> None:
    """Though they fill whole blocks, and come before any other."""
    shape = Shape((200,), 2, 1, 64, 16)
    generator = torch.Generator().manual_seed(5)
    kv = paged(shape, generator)
    q_THD = queries(shape, 1, generator).abs()
    positions = torch.arange(num_hidden)
    kv.k_pages[kv.page_table_BP[0, positions // 16].long(), :, positions % 16] = float("-inf")
    k, v = (
        x[kv.page_table_BP[0].long(), 0].flatten(0, 1)[num_hidden:200].double()
        for x in (kv.k_pages, kv.v_pages)
    )
    weights_HT = torch.softmax(q_THD[0].double() @ k.T / 64**0.5, dim=1)
    arguments = (q_THD, kv.k_pages, kv.v_pages, kv.page_table_BP)
    for out in (decode_attention(team, *arguments, [200]), extend_attention(team, *arguments, [199], [1])):
        assert_within_rounding(out[0], weights_HT @ v, weights_HT @ v.abs())


@pytest.mark.parametrize("lens", [(), (0, 0)], ids=["no sequence", "no new token"])
def test_nothing_to_do(team: Team, lens: Sequence[int]) -> None:
    pages = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    table_BP = torch.zeros(len(lens), 1, dtype=torch.int32)
    out = extend_attention(team, pages.new_zeros(0, 4, 64), pages, pages, table_BP, lens, lens)
    assert out.shape == (0, 4, 64)
