"""Codes of 8 bits for rows of activations: the kernel of `shared.kernels.row_codes.quantize_rows`, its slow twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.row_codes import LEAST


@triton.jit
def code_bytes(x, inverse, IS_FLOAT: tl.constexpr):
    """The codes nearest to x * inverse, as bytes. Ties go to even, and NaN has the code 0.

    A number of e4m3 is a multiple of a step, which is 2^-3 of the power of two below it, and 2^-9 at least.
    """
    x *= inverse
    rounder = 12582912.0  # 1.5 * 2 ** 23: the sum has no bits behind the point, and ties go to even
    if IS_FLOAT:
        step = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 127 - 6) - 3
        inverse_step = ((254 - step) << 23).to(tl.float32, bitcast=True)
        x = ((x * inverse_step + rounder) - rounder) * (step << 23).to(tl.float32, bitcast=True)
        return tl.where(x == x, x, 0.0).to(tl.float8e4nv).to(tl.int8, bitcast=True)
    x = (x + rounder) - rounder
    return tl.where(x == x, x, 0.0).to(tl.int8)


@triton.jit
def row_codes_kernel(
    x,
    order,
    codes,
    scales,
    sums,
    K,
    LEAST: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """One program a group of a row. Codes are integers, or FP8, which has no sums."""
    IS_FLOAT: tl.constexpr = codes.dtype.element_ty == tl.float8e4nv
    LARGEST: tl.constexpr = 448.0 if IS_FLOAT else 127.0
    row, group, num_groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, BLOCK)
    inside = i < GROUP_K
    k = group * GROUP_K + i
    source = tl.load(order + k, mask=inside, other=0) if HAS_ORDER else k
    value = tl.load(x + row * K + source, mask=inside, other=0.0).to(tl.float32)
    # As integers, so that a NaN is the largest of all.
    most_bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=0)
    most = most_bits.to(tl.float32, bitcast=True)
    inverse = tl.where(most < LEAST, 0.0, tl.div_rn(LARGEST, tl.where(most < LEAST, 1.0, most)))
    code = code_bytes(value, inverse, IS_FLOAT)
    tl.store(codes.to(tl.pointer_type(tl.int8)) + row * K + k, code, mask=inside)
    tl.store(scales + row * num_groups + group, tl.div_rn(most, LARGEST))
    if not IS_FLOAT:
        tl.store(sums + row * num_groups + group, tl.sum(code.to(tl.int32), axis=0))


def row_codes(
    x_MK: torch.Tensor, order_K: torch.Tensor | None, group_size: int, *, is_float: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes [M, K] of rows in this order, scales [M, G] float32, and sums of codes [M, G] int32.

    Codes are int8, or e4m3 if `is_float`, without sums. x is contiguous.
    """
    (M, K), size = x_MK.shape, group_size
    dtype = torch.float8_e4m3fn if is_float else torch.int8
    codes_MK = torch.empty((M, K), dtype=dtype, device=x_MK.device)
    scales_MG = torch.empty((M, K // size), dtype=torch.float32, device=x_MK.device)
    sums_MG = None
    if not is_float:
        sums_MG = torch.empty((M, K // size), dtype=torch.int32, device=x_MK.device)
    block = triton.next_power_of_2(size)
    row_codes_kernel[(M, K // size)](
        x_MK,
        order_K,
        codes_MK,
        scales_MG,
        sums_MG,
        K,
        LEAST=LEAST,
        GROUP_K=size,
        BLOCK=block,
        HAS_ORDER=order_K is not None,
        num_warps=row_codes_warps(block),
        enable_fp_fusion=False,
    )
    return codes_MK, scales_MG, sums_MG


def row_codes_warps(block: int) -> int:
    """Warps for so many elements."""
    return min(max(block // 512, 1), 8)
