"""Paged attention against its slow twins, and the bits of a token against those of one extend over its sequence.

What no sequence owns, page 0 and what lies behind a sequence's last token are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shared.engine.cuda.triton_attention import TritonAttention
from shared.errors import ConfigError
from shared.kernels.reference import extend_attention
from shared.kernels.row_codes import LARGEST, quantize_rows, split_codes
from shared.kernels.triton.attention import PagedAttention
from shared.kernels.triton.attention_work import SPLIT
from tests.backend_rig import batch_over, block_words
from tests.device import device

pytestmark = pytest.mark.usefixtures("beside_device")

DEVICE = device()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Heads:
    """H query heads over K KV heads of D elements, in pages of S tokens."""

    H: int
    K: int
    D: int
    S: int = 16
    dtype: torch.dtype = torch.float32
    codes: torch.dtype | None = None

    def __str__(self) -> str:
        kind = f"{self.dtype}{'' if self.codes is None else f'-{self.codes}'}".replace("torch.", "")
        return f"H{self.H}-K{self.K}-D{self.D}-page{self.S}-{kind}"

    def kernels(
        self, num_programs: int = 3, workspace_nbytes: int = 1 << 20, *, exact: bool = True
    ) -> PagedAttention:
        return PagedAttention(
            num_heads=self.H,
            num_kv_heads=self.K,
            head_dim=self.D,
            page_size=self.S,
            dtype=self.dtype,
            device=DEVICE,
            exact=exact,
            has_codes=self.codes is not None,
            workspace_nbytes=workspace_nbytes,
            num_programs=num_programs,
        )


class PagedKV:
    """K and V of sequences of `lengths` tokens, in shuffled pages. NaN is everywhere else."""

    def __init__(self, heads: Heads, lengths: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_pages = [-(-length // heads.S) for length in lengths]
        shuffled = 1 + torch.randperm(sum(num_pages) + 2, generator=generator)
        self.table_BP = np.zeros((len(lengths), max(num_pages) + 1), dtype=np.int32)
        shape = (len(shuffled) + 1, heads.K, heads.S, heads.D + 4 * (heads.codes is not None))
        self.page_size = heads.S
        self.pages = [torch.full(shape, torch.nan, dtype=heads.dtype) for _ in range(2)]
        if heads.codes is not None:
            self.pages = [
                torch.full(shape, -1, dtype=torch.int8).view(heads.codes) for _ in range(2)
            ]  # the scales are NaN, and so are codes of FP8
        for b, count in enumerate(num_pages):
            self.table_BP[b, :count] = shuffled[sum(num_pages[:b]) :][:count]
        for b, length in enumerate(lengths):
            page_T, offset_T = self.table_BP[b, np.arange(length) // heads.S], np.arange(length) % heads.S
            at = torch.from_numpy(page_T).long(), slice(None), torch.from_numpy(offset_T)
            for pages in self.pages:
                values = torch.randn(length, heads.K, heads.D, generator=generator).to(heads.dtype)
                if heads.codes is not None:
                    codes, scales = split_codes(pages)
                    codes_of, scales[at] = quantize_rows(values, heads.codes)
                    codes.view(torch.int8)[at] = codes_of.view(torch.int8)
                else:
                    pages[at] = values

    def attention(
        self,
        kernels: PagedAttention,
        q_THD: torch.Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """By the kernels, for the sequences in their order."""
        extends = {
            row: (start, [0] * length)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        }
        batch = batch_over(self.table_BP, self.page_size, extends, {})
        ours, others = batch.page_table_BP, np.full_like(batch.page_table_BP, len(self.pages[0]) - 1)
        tables = (ours, others) if window is None else (others, ours)  # layers with windows have their own
        batch = replace(batch, page_table_BP=tables[0], window_table_BP=tables[1])
        words = block_words(batch, self.page_size, TritonAttention(kernels).work(batch))
        k_pages, v_pages = (pages.to(DEVICE) for pages in self.pages)
        sinks_H = None if sinks_H is None else sinks_H.to(DEVICE)
        words = words.to(DEVICE)
        return kernels(q_THD.to(DEVICE), k_pages, v_pages, words, window=window, sinks_H=sinks_H).cpu()


BATCHES = {
    "one-token": ([0], [1]),
    "decode": ([0, 62, 63, 64, 500], [1, 1, 1, 1, 1]),
    "split-edges": ([510, 511, 512], [1, 1, 1]),
    "extends": ([0, 30, 500], [70, 3, 33]),
    "mixed": ([490, 0, 700], [40, 17, 1]),
}
HEADS = [
    Heads(1, 1, 64),
    Heads(16, 1, 64),
    Heads(4, 2, 96),
    Heads(5, 1, 128),
    Heads(2, 1, 256),
    Heads(9, 3, 24),
    Heads(6, 2, 32, S=1),
    Heads(4, 4, 16, S=3),
    Heads(6, 2, 64, dtype=torch.float16),
    Heads(4, 2, 128, dtype=torch.float16),
    Heads(5, 1, 128, codes=torch.int8),
    Heads(4, 2, 96, S=3, codes=torch.int8),
    Heads(4, 2, 64, dtype=torch.float16, codes=torch.int8),
    Heads(5, 1, 128, codes=torch.float8_e4m3fn),
    Heads(4, 2, 96, S=3, dtype=torch.float16, codes=torch.float8_e4m3fn),
]
if DEVICE.type == "cuda":
    HEADS += [replace(heads, dtype=torch.bfloat16) for heads in HEADS if heads.D % 8 == 0]


WINDOWS = (1, 63, 64, 65, SPLIT, SPLIT + 70, None)
IS_INTERPRETED = DEVICE.type == "cpu"
"""A case takes a second then, so each kind of heads has one of the batches in either way, and each window all of them
in one."""


@pytest.mark.parametrize(
    ("heads", "batch", "exact"),
    [
        pytest.param(heads, batch, exact, id=f"{heads}-{batch}-{'exact' if exact else 'fast'}")
        for (i, heads), (j, batch), exact in product(enumerate(HEADS), enumerate(BATCHES), (True, False))
        if not IS_INTERPRETED or (i + j + 2 * exact) % len(BATCHES) == 0
    ],
)
def test_against_the_slow_twin(heads: Heads, batch: str, exact: bool) -> None:
    starts, lengths = BATCHES[batch]
    kv = PagedKV(heads, [start + length for start, length in zip(starts, lengths, strict=True)], seed=1)
    q_THD = torch.randn(sum(lengths), heads.H, heads.D, generator=torch.Generator().manual_seed(2)).to(
        heads.dtype
    )
    out = kv.attention(heads.kernels(num_programs=3 if exact else 40, exact=exact), q_THD, starts, lengths)
    expected = extend_attention(q_THD, *kv.pages, torch.from_numpy(kv.table_BP).long(), starts, lengths)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[heads.dtype], rtol=TOLERANCE[heads.dtype])


@pytest.mark.parametrize(
    ("window", "batch", "exact"),
    [
        (window, batch, exact)
        for (i, window), (j, batch), exact in product(enumerate(WINDOWS), enumerate(BATCHES), (True, False))
        if not IS_INTERPRETED or exact == ((i + j) % 2 == 0)
    ],
)
def test_windows_and_sinks_against_the_slow_twin(window: int | None, batch: str, exact: bool) -> None:
    """What lies before the first window of a sequence is NaN. Every second window has sinks."""
    heads = Heads(6, 2, 32)
    starts, lengths = BATCHES[batch]
    kv = PagedKV(heads, [start + length for start, length in zip(starts, lengths, strict=True)], seed=1)
    q_THD = torch.randn(sum(lengths), heads.H, heads.D, generator=torch.Generator().manual_seed(2))
    table = torch.from_numpy(kv.table_BP).long()
    sinks_H = torch.tensor([-200.0, *torch.linspace(-3, 8, heads.H - 1)])
    sinks_H = sinks_H if window is None or window % 2 else None
    expected = extend_attention(q_THD, *kv.pages, table, starts, lengths, window, sinks_H)
    for b, start in enumerate(starts):
        for token in range(start + 1 - (window or start + 1)):
            for pages in kv.pages:
                pages[table[b, token // heads.S], :, token % heads.S] = torch.nan
    kernels = heads.kernels(num_programs=3 if exact else 40, exact=exact)
    out = kv.attention(kernels, q_THD, starts, lengths, window, sinks_H)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("codes", LARGEST, ids=str)
def test_small_codes_of_v_beside_float16(codes: torch.dtype) -> None:
    """A weight times a scale of V is not rounded to the few bits of a subnormal."""
    heads = Heads(4, 2, 64, dtype=torch.float16, codes=codes)
    kv, q_THD = PagedKV(heads, [200], seed=1), torch.randn(1, heads.H, heads.D).half()
    split_codes(kv.pages[1])[1].mul_(1e-4)
    out = kv.attention(heads.kernels(), q_THD, [199], [1])
    expected = extend_attention(q_THD.float(), *kv.pages, torch.from_numpy(kv.table_BP).long(), [199], [1])
    assert (out - expected).abs().max() < 0.01 * expected.abs().max()


def test_q_may_be_a_part_of_the_projection() -> None:
    """As `norm_rope_write` may return it: the heads of k and v lie between those of two tokens."""
    heads = Heads(4, 2, 32)
    kv = PagedKV(heads, [20], seed=1)
    qkv = torch.randn(20, heads.H + 2 * heads.K, heads.D)
    out = kv.attention(heads.kernels(), qkv[:, : heads.H], [0], [20])
    assert torch.equal(out, kv.attention(heads.kernels(), qkv[:, : heads.H].contiguous(), [0], [20]))


def test_heads_that_cannot_be_loaded_are_refused() -> None:
    with pytest.raises(ConfigError, match="20 elements"):
        Heads(1, 1, 20, dtype=torch.float16).kernels()


def test_pages_beyond_two_billion_elements() -> None:
    """The memory is never touched but for two pages, so it costs addresses alone."""
    heads = Heads(1, 1, 16, dtype=torch.float16)
    kv = PagedKV(heads, [20], seed=1)
    few, num_pages = kv.pages, 2**31 // (heads.S * heads.D) + 3
    q_THD = torch.randn(20, 1, 16).half()
    expected = kv.attention(heads.kernels(), q_THD, [0], [20])
    pages = torch.empty(2, num_pages, 1, heads.S, heads.D, dtype=torch.float16, device=DEVICE)
    for i, page in enumerate(kv.table_BP[0, :2].tolist()):
        for of_all, of_few in zip(pages, few, strict=True):
            of_all[num_pages - 1 - i] = of_few[page]
    kv.pages, kv.table_BP = [*pages], np.array([[num_pages - 1, num_pages - 2]], dtype=np.int32)
    assert torch.equal(kv.attention(heads.kernels(), q_THD, [0], [20]), expected)


def test_a_mean_that_underflows_is_plus_zero() -> None:
    """Another way of the same row may have +0 there."""
    heads = Heads(1, 1, 16)
    kv = PagedKV(heads, [4], seed=1)
    kv.pages[1][kv.table_BP[0, 0], :, :4] = 0.0
    kv.pages[1][kv.table_BP[0, 0], :, 2] = -torch.finfo(torch.float32).smallest_normal * 2**-23
    out = kv.attention(heads.kernels(), torch.zeros(4, 1, 16), [0], [4])
    assert not bits(out[3]).any()


LENGTH = 2 * SPLIT + 130
EXACT = Heads(3, 1, 16, dtype=torch.float32 if DEVICE.type == "cpu" else torch.bfloat16)
"""Three query heads of a token: tiles begin in the middle of one. With codes, which are slow to interpret, one."""


@dataclass(frozen=True)
class WholeSequence:
    """One sequence of LENGTH tokens with its queries, and the bits of an extend over all of it."""

    heads: Heads
    kv: PagedKV
    q_THD: torch.Tensor
    window: int | None
    sinks_H: torch.Tensor | None
    out_THD: torch.Tensor


@pytest.fixture(scope="module", params=[None, *LARGEST, 70, SPLIT + 70], ids=str)
def whole(request: pytest.FixtureRequest) -> WholeSequence:
    """Of numbers or codes, or with a window and sinks."""
    window = request.param if isinstance(request.param, int) else None
    heads = EXACT
    if not window and request.param is not None:
        heads = replace(EXACT, H=1 if IS_INTERPRETED else EXACT.H, codes=request.param)
    sinks_H = torch.linspace(-1, 4, heads.H) if window else None
    kv = PagedKV(heads, [LENGTH], seed=3)
    if heads.codes is None:
        # Zeros of both signs, numbers whose products underflow, and weights that underflow.
        kv.pages[1][..., :3] = torch.tensor([-0.0, -1e-38, 1e-38], dtype=EXACT.dtype)
    q_THD = torch.randn(LENGTH, heads.H, heads.D, generator=torch.Generator().manual_seed(4))
    q_THD[:, -1] *= 30.0
    q_THD = q_THD.to(EXACT.dtype)
    out = kv.attention(heads.kernels(workspace_nbytes=0), q_THD, [0], [LENGTH], window, sinks_H)
    return WholeSequence(heads, kv, q_THD, window, sinks_H, out)


@dataclass(frozen=True)
class Piece:
    """Tokens of the sequence that a forward computes, one of them in a decode step."""

    start: int
    length: int


near_edges = st.sampled_from([0, 1, 63, 64, 65, 511, 512, 513, 1023, 1024, LENGTH - 1])
pieces = st.builds(
    lambda start, length: Piece(start, min(length, LENGTH - start)),
    st.one_of(near_edges, st.integers(0, LENGTH - 1)),
    st.one_of(st.just(1), st.integers(1, 90)),
)


@given(
    pieces=st.lists(pieces, min_size=1, max_size=3),
    num_programs=st.sampled_from([1, 3, 50]),
    workspace_rows=st.sampled_from([0, 10, 10_000]),
)
@settings(max_examples=10)
def test_every_cut_gives_the_same_bits(
    whole: WholeSequence, pieces: list[Piece], num_programs: int, workspace_rows: int
) -> None:
    """Pieces are sequences of one batch, with the same K and V. Behind a piece and before its window all is NaN."""
    kv = PagedKV(whole.heads, [LENGTH] * len(pieces), seed=5)
    for b, piece in enumerate(pieces):
        end = piece.start + piece.length
        for pages, known in zip(kv.pages, whole.kv.pages, strict=True):
            pages[kv.table_BP[b, :-1]] = known[whole.kv.table_BP[0, :-1]]
            last = kv.table_BP[b, (end - 1) // EXACT.S]
            values = pages if whole.heads.codes is None else split_codes(pages)[1]
            values[last, :, (end - 1) % EXACT.S + 1 :] = torch.nan
            values[kv.table_BP[b, (end - 1) // EXACT.S + 1 : -1]] = torch.nan
            num_before = max(piece.start + 1 - (whole.window or LENGTH), 0) // EXACT.S
            values[kv.table_BP[b, :num_before]] = torch.nan
    kernels = whole.heads.kernels(num_programs, workspace_rows * EXACT.K * (EXACT.D + 2) * 4)
    tokens = np.concatenate([np.arange(piece.start, piece.start + piece.length) for piece in pieces])
    out = kv.attention(
        kernels,
        whole.q_THD[tokens],
        [piece.start for piece in pieces],
        [piece.length for piece in pieces],
        whole.window,
        whole.sinks_H,
    )
    assert torch.equal(bits(out), bits(whole.out_THD[tokens]))


def test_splits_are_added_in_order() -> None:
    """The first two cancel out exactly, and are so large that the third is lost in either: every order shows."""
    kv = PagedKV(EXACT, [LENGTH], seed=6)
    first, second = kv.table_BP[0, : 2 * SPLIT // EXACT.S].reshape(2, -1)
    kv.pages[0][second] = kv.pages[0][first]
    kv.pages[1][first] *= 2.0**20
    kv.pages[1][second] = -kv.pages[1][first]
    tokens = np.arange(2 * SPLIT, LENGTH, 43)
    q_THD = torch.randn(len(tokens), EXACT.H, EXACT.D, generator=torch.Generator().manual_seed(7))
    q_THD = (q_THD / 4).to(EXACT.dtype)
    batch = PagedKV(EXACT, [LENGTH], seed=6)
    batch.pages, batch.table_BP = kv.pages, kv.table_BP.repeat(len(tokens), axis=0)
    lengths = [1] * len(tokens)
    whole = batch.attention(EXACT.kernels(workspace_nbytes=0), q_THD, tokens.tolist(), lengths)
    cut = batch.attention(EXACT.kernels(num_programs=50), q_THD, tokens.tolist(), lengths)
    assert torch.equal(bits(cut), bits(whole))
    kv.pages[1][np.concatenate([first, second])] = 0.0
    rows = torch.from_numpy(batch.table_BP).long()
    expected = extend_attention(q_THD, *kv.pages, rows, tokens.tolist(), lengths)
    tolerance = TOLERANCE[EXACT.dtype]
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
