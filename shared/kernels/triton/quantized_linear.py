"""x W^T + bias with weights of 8 or 4 bits: activations become codes of 8 bits, and products are summed as integers.

The slow twin is `QuantizedLinear.multiply`. Sums of a group are exact, and groups are added in ascending order in
float32, so a row has the same bits for any number of rows and any shape of tiles. Codes of 4 bits lie two in a byte
and are unpacked in registers. Where activations stay in 16 bits, codes less their zeros become numbers of their type.

Products of FP8 by FP8 are exact too, but matrix instructions may add them up in fewer bits than float32 has. Hopper's
have about 14, so there sums of `FLOAT_K` inputs are added in float32, as DeepSeek-V3 has it
(https://arxiv.org/abs/2412.19437, 3.3.2). No tile is so low that it would take another instruction: on Hopper those
of 16 rows would be products of fp16. `same_bits` shows on the GPU that tiles agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.triton.row_codes import row_codes

LEAST_K = 32
"""Inputs of a matrix instruction of int8: groups are multiples of it."""
MOST_K = {8: 64, 4: 128}
"""Inputs of a step, by bits: loads of 16 bytes, and no spilled registers."""
FLOAT_K = 128
"""The same for products of FP8."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the result that a program computes, [m, n], and how."""

    m: int
    n: int
    num_warps: int
    num_stages: int


FEW = Tile(16, 64, num_warps=4, num_stages=4)
MANY = Tile(64, 32, num_warps=4, num_stages=4)
FLOAT_FEW = Tile(64, 32, num_warps=4, num_stages=4)
"""For products of FP8, up to MOST_FEW rows: smaller tiles give every multiprocessor work."""
FLOAT_MANY = Tile(128, 64, num_warps=8, num_stages=4)
MOST_FEW = 256


@triton.jit(do_not_specialize=["M"])
def quantized_linear_kernel(
    x,
    x_scales,
    x_sums,
    weight,
    scales,
    zeros,
    bias,
    out,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_K: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One program a tile: those of one column follow each other, so that its weights come from the L2 cache.

    Codes are integers, or those of x and the weight are FP8.
    """
    IS_FLOAT: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    num_m = tl.cdiv(M, BM)
    m = tl.program_id(0) % num_m * BM + tl.arange(0, BM)
    n = tl.program_id(0) // num_m * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    middle: tl.constexpr = 1 << (BITS - 1)
    has_m, has_n = m < M, n < N
    num_groups = K // GROUP_K
    x_at = x + m[:, None].to(tl.int64) * K + k[None, :]
    if BITS == 4:
        weight_at = weight + n[:, None].to(tl.int64) * (K // 2) + tl.arange(0, BK // 2)[None, :]
    else:
        weight_at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for group in range(num_groups):
        sums = tl.zeros((BM, BN), dtype=tl.float32 if IS_FLOAT else tl.int32)
        for first in range(group * GROUP_K, (group + 1) * GROUP_K, BK):
            x_part = tl.load(x_at + first, mask=has_m[:, None], other=0.0 if IS_FLOAT else 0)
            if BITS == 4:
                pairs = tl.load(weight_at + first // 2, mask=has_n[:, None], other=0)
                codes = tl.interleave(pairs & 15, pairs >> 4)
            else:
                codes = tl.load(weight_at + first, mask=has_n[:, None], other=0)
            if IS_FLOAT:
                numbers = tl.trans(codes.to(tl.float8e4nv, bitcast=True))
                sums = tl.dot(x_part, numbers, sums, max_num_imprecise_acc=BK)
            else:
                signed = (codes.to(tl.int16) - middle).to(tl.int8)
                sums = tl.dot(x_part, tl.trans(signed), sums, out_dtype=tl.int32)
        if HAS_ZEROS:
            zero = tl.load(zeros + n * num_groups + group, mask=has_n, other=0).to(tl.int32)
            of_rows = tl.load(x_sums + m * num_groups + group, mask=has_m, other=0)
            sums += of_rows[:, None] * (middle - zero)[None, :]
        x_scale = tl.load(x_scales + m * num_groups + group, mask=has_m, other=0.0)
        scale = tl.load(scales + n * num_groups + group, mask=has_n, other=0.0)
        total += sums.to(tl.float32) * (x_scale[:, None] * scale[None, :])
    if HAS_BIAS:
        total += tl.load(bias + n, mask=has_n, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=has_m[:, None] & has_n[None, :])


@triton.jit(do_not_specialize=["M"])
def weight_only_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    out,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_K: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    """One program a tile, as in `quantized_linear_kernel`."""
    num_m = tl.cdiv(M, BM)
    m = tl.program_id(0) % num_m * BM + tl.arange(0, BM)
    n = tl.program_id(0) // num_m * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    has_m, has_n = m < M, n < N
    num_groups = K // GROUP_K
    x_at = x + m[:, None].to(tl.int64) * K + k[None, :]
    if BITS == 4:
        weight_at = weight + n[:, None].to(tl.int64) * (K // 2) + tl.arange(0, BK // 2)[None, :]
    else:
        weight_at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for group in range(num_groups):
        zero = tl.full((BN,), 1 << (BITS - 1), dtype=tl.int16)
        if HAS_ZEROS:
            zero = tl.load(zeros + n * num_groups + group, mask=has_n, other=0).to(tl.int16)
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for first in range(group * GROUP_K, (group + 1) * GROUP_K, BK):
            x_part = tl.load(x_at + first, mask=has_m[:, None], other=0.0)
            if BITS == 4:
                pairs = tl.load(weight_at + first // 2, mask=has_n[:, None], other=0)
                codes = tl.interleave(pairs & 15, pairs >> 4)
            else:
                codes = tl.load(weight_at + first, mask=has_n[:, None], other=0)
            if IS_FLOAT:
                numbers = codes.to(tl.float8e4nv, bitcast=True).to(x.dtype.element_ty)
            else:
                numbers = (codes.to(tl.int16) - zero[:, None]).to(tl.float32).to(x.dtype.element_ty)
            sums = tl.dot(x_part, tl.trans(numbers), sums, input_precision="ieee")
        scale = tl.load(scales + n * num_groups + group, mask=has_n, other=0.0)
        total += sums * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=has_n, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=has_m[:, None] & has_n[None, :])


def quantized_linear(
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor | None,
    order_K: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    *,
    bits: int,
    is_weight_only: bool,
    is_float: bool,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, [M, N], in the type of x, by a `tile` that is chosen by M.

    `weight` is uint8: [N, K] of 8 bits, or [N, K / 2] of 4, the even input in the lower half. Groups are multiples of
    LEAST_K. Column k of the weight is input order_K[k]. If `is_float`, its bytes are FP8 (e4m3), and so are the codes
    of x.
    """
    (M, K), (N, num_groups) = x_MK.shape, scales_NG.shape
    group_size = K // num_groups
    out_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    if not M:
        return out_MN
    has_float_products = is_float and not is_weight_only
    if has_float_products:
        tile, most_k = tile or (FLOAT_FEW if M <= MOST_FEW else FLOAT_MANY), FLOAT_K
    else:
        tile, most_k = tile or (FEW if FEW.m >= M else MANY), MOST_K[bits]
    of_layer = weight, scales_NG, zeros_NG, bias_N, out_MN, M, N, K
    constants = {
        "BM": tile.m,
        "BN": tile.n,
        "BK": math.gcd(group_size, most_k),
        "GROUP_K": group_size,
        "BITS": bits,
        "HAS_ZEROS": zeros_NG is not None,
        "HAS_BIAS": bias_N is not None,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    grid = (triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)
    if is_weight_only:
        in_order_MK = x_MK if order_K is None else x_MK[:, order_K]
        weight_only_kernel[grid](
            in_order_MK.contiguous(), *of_layer, **constants, IS_FLOAT=is_float, **options
        )
    else:
        codes = row_codes(x_MK.contiguous(), order_K, group_size, is_float=is_float)
        quantized_linear_kernel[grid](*codes, *of_layer, **constants, **options)
    return out_MN


def same_bits(depths: Iterable[int], device: torch.device) -> bool:
    """Whether all tiles of FP8 give the same bits on this GPU, for each K of `depths`, wherever a row is."""
    return all(_same_bits(K, device) for K in depths if K % LEAST_K == 0)


def _same_bits(K: int, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    x_MK, weight_NK = (torch.randn(size, K, generator=generator, device="cpu") for size in (160, 96))
    codes_NK = weight_NK.to(torch.float8_e4m3fn).view(torch.uint8).to(device)
    scales_NG = torch.ones(len(codes_NK), 1, device=device)

    def product(x_MK: torch.Tensor, tile: Tile) -> torch.Tensor:
        return quantized_linear(
            x_MK,
            codes_NK,
            scales_NG,
            None,
            None,
            None,
            bits=8,
            is_weight_only=False,
            is_float=True,
            tile=tile,
        )

    x_MK = x_MK.to(device)
    expected_MN = product(x_MK, FLOAT_FEW)
    return all(
        torch.equal(product(x_MK[first:], tile), expected_MN[first:])
        for tile in (FLOAT_FEW, FLOAT_MANY)
        for first in range(0, 160, 67)
    )
