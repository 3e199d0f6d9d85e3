"""Causal attention over KV pages in bf16: the native twins of `shared.kernels.reference`.

Shapes: B sequences, T new tokens, H query heads, K KV heads, D head_dim, N pages, P pages of a sequence, S page_size.
A sequence's result is the same bits in any batch, for a team of any size and for any cut of its prompt into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.kernels.cpu.decoder import MAX_GROUP, MAX_HEAD_DIM
from shared.kernels.cpu.library import Team
from tests.kernels.cpu.prototypes import kernel


def decode_attention(
    team: Team,
    q_BHD: torch.Tensor,
    k_pages_NKSD: torch.Tensor,
    v_pages_NKSD: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: Sequence[int],
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for one new token of each sequence, which is among the `seq_lens_B` tokens already.

    `page_table_BP` is int32. What lies in a page behind a sequence's end, or before its window, has no influence, be
    it inf or NaN.
    """
    assert len(q_BHD) == len(seq_lens_B)
    starts = [seq_len - 1 for seq_len in seq_lens_B]
    lengths = [1] * len(seq_lens_B)
    pages = k_pages_NKSD, v_pages_NKSD, page_table_BP
    return _attend(team, "baton_decode_attention", q_BHD, *pages, starts, lengths, window, sinks_H)


def extend_attention(
    team: Team,
    q_THD: torch.Tensor,
    k_pages_NKSD: torch.Tensor,
    v_pages_NKSD: torch.Tensor,
    page_table_BP: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for tokens [start, start + length) of each sequence, each over all tokens up to itself."""
    assert len(q_THD) == sum(lengths)
    pages = k_pages_NKSD, v_pages_NKSD, page_table_BP
    return _attend(team, "baton_extend_attention", q_THD, *pages, starts, lengths, window, sinks_H)


def _attend(
    team: Team,
    function: str,
    q_THD: torch.Tensor,
    k_pages_NKSD: torch.Tensor,
    v_pages_NKSD: torch.Tensor,
    page_table_BP: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, page_size = k_pages_NKSD.shape[1:3]
    has_codes = k_pages_NKSD.dtype == torch.int8
    assert all(x.is_contiguous() for x in (q_THD, k_pages_NKSD, v_pages_NKSD))
    assert q_THD.dtype == torch.bfloat16 and (has_codes or k_pages_NKSD.dtype == torch.bfloat16)
    assert k_pages_NKSD.dtype == v_pages_NKSD.dtype
    assert k_pages_NKSD.shape == v_pages_NKSD.shape and k_pages_NKSD.shape[3] == head_dim + 4 * has_codes
    assert head_dim % 16 == 0 and 0 < head_dim <= MAX_HEAD_DIM
    assert num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= MAX_GROUP
    assert page_table_BP.dtype == torch.int32 and page_table_BP.stride(1) == 1
    assert len(page_table_BP) == len(starts) == len(lengths)
    assert all(
        start >= 0 and length >= 0 and start + length <= page_table_BP.shape[1] * page_size
        for start, length in zip(starts, lengths, strict=True)
    )
    assert window is None or window > 0
    assert sinks_H is None or (sinks_H.shape == (num_heads,) and sinks_H.dtype == torch.float32)
    starts_B, lengths_B = torch.tensor(starts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
    out_THD = torch.empty_like(q_THD)
    kernel(team, function)(
        team.handle,
        q_THD.data_ptr(),
        k_pages_NKSD.data_ptr(),
        v_pages_NKSD.data_ptr(),
        page_size,
        num_kv_heads,
        head_dim,
        has_codes,
        len(starts),
        page_table_BP.data_ptr(),
        page_table_BP.stride(0),
        starts_B.data_ptr(),
        lengths_B.data_ptr(),
        num_heads,
        window or 0,
        None if sinks_H is None else sinks_H.data_ptr(),
        out_THD.data_ptr(),
    )
    return out_THD
