"""Paged attention in plain torch: the attention of the torch backend, and the slow twin of every faster kernel.

Shapes: B sequences, T new tokens, H query heads, K KV heads, D head_dim, N pages, P pages of a sequence, S page_size.

With a `window` a token sees the last `window` keys, itself among them, as with `sliding_window` of transformers.
A sink (arXiv 2309.17453; gpt-oss) is a learned logit of a query head. It takes part in the sum of the head's softmax
and has no value, so the weights of the keys add up to less than 1. It is not scaled by 1 / sqrt(D).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from shared.kernels.row_codes import LARGEST, quantize_rows, split_codes


def write_kv(
    k_pages_NKSD: torch.Tensor,
    v_pages_NKSD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    pages_T: torch.Tensor,
    offsets_T: torch.Tensor,
) -> None:
    """Write the K and V of new tokens into their pages, which may hold codes.

    Pages and offsets are SGLang's out_cache_loc.
    """
    for pages_NKSD, x_TKD in ((k_pages_NKSD, k_TKD), (v_pages_NKSD, v_TKD)):
        if pages_NKSD.dtype in LARGEST:
            codes_NKSD, scales_NKS = split_codes(pages_NKSD)
            codes_TKD, scales_NKS[pages_T, :, offsets_T] = quantize_rows(x_TKD, pages_NKSD.dtype)
            codes_NKSD.view(torch.int8)[pages_T, :, offsets_T] = codes_TKD.view(torch.int8)
        else:
            pages_NKSD[pages_T, :, offsets_T] = x_TKD


def extend_attention(
    q_THD: torch.Tensor,
    k_pages_NKSD: torch.Tensor,
    v_pages_NKSD: torch.Tensor,
    page_table_BP: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(D)) v, causally, for tokens [start, start + length) of each sequence.

    The K and V of the new tokens must be in their pages already. `starts` are SGLang's extend_prefix_lens, and
    `lengths` its extend_seq_lens. Pages before the window of the first new token are not read.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    page_size = k_pages_NKSD.shape[2]
    first = 0
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        end = start + length
        first_page = 0 if window is None else max(start + 1 - window, 0) // page_size
        begin = first_page * page_size
        pages_P = page_table_BP[b, first_page : -(-end // page_size)]
        q_HTD = q_THD[first : first + length].transpose(0, 1)
        k_KTD, v_KTD = (
            _values(pages_NKSD[pages_P], q_THD.dtype).transpose(0, 1).flatten(1, 2)[:, : end - begin]
            for pages_NKSD in (k_pages_NKSD, v_pages_NKSD)
        )
        mask = None
        if 1 < length < end or window is not None or sinks_H is not None:
            mask = torch.ones(length, end - begin, dtype=torch.bool, device=q_THD.device).tril(start - begin)
            if window is not None:
                mask = mask.triu(start + 1 - window - begin)
            if sinks_H is not None:
                k_KTD, v_KTD, mask = _with_sinks(q_HTD, k_KTD, v_KTD, mask, sinks_H[:, None])
        o_HTD = F.scaled_dot_product_attention(
            q_HTD[None],
            k_KTD[None],
            v_KTD[None],
            attn_mask=mask,
            is_causal=mask is None and length == end > 1,
            enable_gqa=q_THD.shape[1] != k_KTD.shape[0],
        )[0]
        out_THD[first : first + length] = o_HTD.transpose(0, 1)
        first += length
    return out_THD


def decode_attention(
    q_BHD: torch.Tensor,
    k_pages_NKSD: torch.Tensor,
    v_pages_NKSD: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one new token of each sequence, in one call over the padded page table.

    The query heads of one KV head are rows of one matrix, so grouped queries need no copies of K and V.
    """
    B, H, D = q_BHD.shape
    K, S = k_pages_NKSD.shape[1:3]
    num_tokens = page_table_BP.shape[1] * S
    k_BKTD, v_BKTD = (
        _values(pages_NKSD[page_table_BP], q_BHD.dtype).transpose(1, 2).reshape(B, K, num_tokens, D)
        for pages_NKSD in (k_pages_NKSD, v_pages_NKSD)
    )
    positions_T = torch.arange(num_tokens, device=q_BHD.device)
    visible_BT = positions_T < seq_lens_B[:, None]
    if window is not None:
        visible_BT &= positions_T >= seq_lens_B[:, None] - window
    # Values of an earlier owner, behind the last token of a page, may be inf or NaN, and 0 * NaN is NaN.
    hidden_B1T1 = ~visible_BT[:, None, :, None]
    k_BKTD.masked_fill_(hidden_B1T1, 0.0)
    v_BKTD.masked_fill_(hidden_B1T1, 0.0)
    q_BKGD = q_BHD.view(B, K, H // K, D)
    mask = visible_BT[:, None, None]
    if sinks_H is not None:
        k_BKTD, v_BKTD, mask = _with_sinks(q_BKGD, k_BKTD, v_BKTD, mask, sinks_H.view(K, H // K))
    o_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKTD, v_BKTD, attn_mask=mask)
    return o_BKGD.reshape(B, H, D)


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V with a key and a value of zeros behind the others, and what is added to scores.

    The score of that key is 0, so its row's sink is added to it. Both `visible` [..., keys] and `sinks` [...]
    broadcast over the rows [...] of q.
    """
    rows = q.shape[:-1]
    hidden = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    bias = torch.cat([hidden.expand(*rows, -1), sinks[..., None].to(q.dtype).expand(*rows, 1)], dim=-1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), bias


def _values(pages_KSD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of pages [..., K, S, D] themselves, or of their codes, in `dtype`."""
    if pages_KSD.dtype not in LARGEST:
        return pages_KSD
    codes_KSD, scales_KS = split_codes(pages_KSD)
    return (codes_KSD.float() * scales_KS[..., None]).to(dtype)
