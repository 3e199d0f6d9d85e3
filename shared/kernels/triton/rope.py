"""Angles of tokens, and QK-norm with rotation and the KV write.

The slow twins are `rotary_cos_sin`, `rms_norm` and `apply_rotary` of `shared/model/layers.py`, and `write_kv` of
`shared/kernels/reference.py`. Results are rounded where the twins round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.row_codes import LARGEST, LEAST
from shared.kernels.triton.row_codes import code_bytes

HEADS = 8
"""Heads that a program rotates."""


@triton.jit
def rotary_kernel(positions, waves, cos, sin, R: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < R
    frequency = tl.load(waves + i, mask=inside, other=0.0)
    amplitude = tl.load(waves + R + i, mask=inside, other=0.0)
    angle = tl.load(positions + t).to(tl.float32) * frequency
    dtype = cos.dtype.element_ty
    tl.store(cos + t * R + i, (tl.cos(angle) * amplitude).to(dtype), mask=inside)
    tl.store(sin + t * R + i, (tl.sin(angle) * amplitude).to(dtype), mask=inside)


@triton.jit
def _store_codes(
    pages, head_at, offset, i, first, second, is_row, R: tl.constexpr, S: tl.constexpr, LEAST: tl.constexpr
):
    """Rows of two halves as codes of 8 bits with a scale, as `quantize_rows` makes them."""
    # As integers, so that a NaN is the largest of all.
    most_bits = tl.maximum(
        tl.max(tl.abs(first).to(tl.int32, bitcast=True), axis=1),
        tl.max(tl.abs(second).to(tl.int32, bitcast=True), axis=1),
    )
    most = most_bits.to(tl.float32, bitcast=True)[:, None]
    IS_FLOAT: tl.constexpr = pages.dtype.element_ty == tl.float8e4nv
    LARGEST: tl.constexpr = 448.0 if IS_FLOAT else 127.0
    inverse = tl.where(most < LEAST, 0.0, tl.div_rn(LARGEST, tl.where(most < LEAST, 1.0, most)))
    codes = pages.to(tl.pointer_type(tl.int8)) + head_at + offset * (2 * R) + i
    is_part = is_row & (i < R)
    tl.store(codes, code_bytes(first, inverse, IS_FLOAT), mask=is_part)
    tl.store(codes + R, code_bytes(second, inverse, IS_FLOAT), mask=is_part)
    scales = pages.to(tl.pointer_type(tl.float32)) + (head_at + S * 2 * R) // 4 + offset
    tl.store(scales, tl.div_rn(most, LARGEST), mask=is_row)


@triton.jit
def norm_rope_write_kernel(
    qkv,
    weight,
    cos,
    sin,
    pages,
    offsets,
    q,
    k_pages,
    v_pages,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CODES: tl.constexpr,
    LEAST: tl.constexpr,
):
    """A program has HEADS heads of one token. A head is two tiles: its first and its second half."""
    R: tl.constexpr = D // 2
    dtype = q.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (head < H + 2 * K) & (i < R)
    at = head * D + i
    x = qkv + t * (H + 2 * K) * D + at
    raw_first = tl.load(x, mask=inside, other=0.0)
    raw_second = tl.load(x + R, mask=inside, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        has_weight = (head < H + K) & (i < R)
        weight_first = tl.load(weight + at, mask=has_weight, other=0.0).to(tl.float32)
        weight_second = tl.load(weight + at + R, mask=has_weight, other=0.0).to(tl.float32)
        normed_first = (first * scale).to(weight.dtype.element_ty).to(tl.float32)
        normed_second = (second * scale).to(weight.dtype.element_ty).to(tl.float32)
        first = (weight_first * normed_first).to(dtype).to(tl.float32)
        second = (weight_second * normed_second).to(dtype).to(tl.float32)
    c = tl.load(cos + t * R + i, mask=i < R, other=0.0).to(tl.float32)
    s = tl.load(sin + t * R + i, mask=i < R, other=0.0).to(tl.float32)
    new_first = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    new_second = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)

    is_q = inside & (head < H)
    tl.store(q + t * H * D + at, new_first.to(dtype), mask=is_q)
    tl.store(q + t * H * D + at + R, new_second.to(dtype), mask=is_q)
    page, offset = tl.load(pages + t).to(tl.int64), tl.load(offsets + t).to(tl.int64)
    if HAS_CODES:
        head_elements: tl.constexpr = S * (D + 4)
        is_k = (head >= H) & (head < H + K)
        at_k, at_v = (page * K + head - H) * head_elements, (page * K + head - H - K) * head_elements
        k_first, k_second = new_first.to(dtype).to(tl.float32), new_second.to(dtype).to(tl.float32)
        _store_codes(k_pages, at_k, offset, i, k_first, k_second, is_k, R, S, LEAST)
        is_v = (head >= H + K) & (head < H + 2 * K)
        v_first, v_second = raw_first.to(tl.float32), raw_second.to(tl.float32)
        _store_codes(v_pages, at_v, offset, i, v_first, v_second, is_v, R, S, LEAST)
    else:
        is_k = inside & (head >= H) & (head < H + K)
        k = k_pages + ((page * K + head - H) * S + offset) * D + i
        tl.store(k, new_first.to(dtype), mask=is_k)
        tl.store(k + R, new_second.to(dtype), mask=is_k)
        is_v = inside & (head >= H + K)
        v = v_pages + ((page * K + head - H - K) * S + offset) * D + i
        tl.store(v, raw_first, mask=is_v)
        tl.store(v + R, raw_second, mask=is_v)


def num_warps(head_dim: int) -> int:
    """Return the warps of `norm_rope_write_kernel` whose registers suffice (`make test-cubins`)."""
    return 2 if head_dim <= 128 else 4


def rotary(
    positions_T: torch.Tensor, waves_2R: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, [T, R] each, of frequencies and times amplitudes, the rows of `waves_2R`."""
    num_tokens, num_pairs = len(positions_T), waves_2R.shape[1]
    cos_TR, sin_TR = (
        torch.empty((num_tokens, num_pairs), dtype=dtype, device=positions_T.device) for _ in range(2)
    )
    rotary_kernel[(num_tokens,)](
        positions_T,
        waves_2R,
        cos_TR,
        sin_TR,
        R=num_pairs,
        BLOCK=triton.next_power_of_2(num_pairs),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return cos_TR, sin_TR


def norm_rope_write(
    qkv_TND: torch.Tensor,
    num_kv_heads: int,
    qk_norm_ND: torch.Tensor | None,
    eps: float,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    pages_T: torch.Tensor,
    offsets_T: torch.Tensor,
    k_pages_NKSD: torch.Tensor,
    v_pages_NKSD: torch.Tensor,
) -> torch.Tensor:
    """Norm (where `qk_norm_ND` is given) and rotate q and k, write k and v to their pages, return q [T, H, D].

    All tensors are contiguous, and all but pages and offsets are of one type; the norms may be of float32. Pages of a
    type of codes, [N, K, S, D + 4], get codes and scales (`shared.kernels.row_codes`).
    """
    num_tokens, num_all_heads, head_dim = qkv_TND.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    q_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TND.dtype, device=qkv_TND.device)
    norm_rope_write_kernel[(num_tokens, triton.cdiv(num_all_heads, HEADS))](
        qkv_TND,
        qk_norm_ND,
        cos_TR,
        sin_TR,
        pages_T,
        offsets_T,
        q_THD,
        k_pages_NKSD,
        v_pages_NKSD,
        eps,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        S=k_pages_NKSD.shape[2],
        HEADS=HEADS,
        HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=qk_norm_ND is not None,
        HAS_CODES=k_pages_NKSD.dtype in LARGEST,
        LEAST=LEAST,
        num_warps=num_warps(head_dim),
        enable_fp_fusion=False,
    )
    return q_THD
