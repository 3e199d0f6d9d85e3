"""One launch for the products of all experts, each with the rows of its tokens (grouped GEMM).

The slow twin is `shared.model.experts.multiply`. A tile has rows of one expert, and a row's sums are those of
`shared.kernels.triton.linear` whatever else is in its tile. That rows of one expert are brought together, with tiles
of a fixed height, is the idea of Triton's fused_moe in vLLM (https://github.com/vllm-project/vllm/pull/2453).

Shape suffixes: T tokens, K experts of a token, P = T * K pairs of both, E experts, L tiles of rows, N outputs, D
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from shared.kernels.triton.linear import FEW, FLOAT32, K_CHUNK, Tile
from shared.kernels.triton.quantized_linear import MOST_K
from shared.kernels.triton.row_codes import row_codes

MANY = Tile(64, 128, num_warps=8, num_stages=3)
CODES_FEW = Tile(16, 64, num_warps=4, num_stages=4, num_programs=4)
CODES_MANY = Tile(64, 32, num_warps=4, num_stages=4, num_programs=4)
BLOCK = 512
"""Elements of a token's sum that a program computes."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a token and an expert, in the order of experts. Nothing of it is known on the host."""

    pairs_P: torch.Tensor
    """t * K + k, int64: a stable order, so the tokens of an expert are in theirs."""
    firsts_E: torch.Tensor
    """Where the pairs of an expert begin, and behind the last where all end, int64 [E + 1]."""
    tile_ends_E: torch.Tensor
    """How many tiles of rows there are up to an expert's last, int64."""
    max_tiles: int
    """L, for any choice of experts."""
    tile_rows: int

    @classmethod
    def of(cls, chosen_TK: torch.Tensor, num_experts: int, tile_rows: int) -> Groups:
        """The groups of a choice, in tiles of at most so many rows."""
        experts_P, pairs_P = torch.sort(chosen_TK.flatten(), stable=True)
        bounds = torch.arange(num_experts + 1, device=chosen_TK.device)
        firsts_E = torch.searchsorted(experts_P, bounds)
        tile_ends_E = (-(firsts_E[:-1] - firsts_E[1:]).div(tile_rows, rounding_mode="floor")).cumsum(0)
        most = len(pairs_P) // tile_rows + min(num_experts, len(pairs_P))
        return cls(pairs_P, firsts_E, tile_ends_E, most, tile_rows)


@triton.jit
def _expert_of(tile, tile_ends, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert whose rows a tile has, and the tile's place among its tiles. E behind the last tile."""
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(tile_ends + e, mask=e < E, other=0)
    is_before = (e < E) & (ends <= tile)
    return tl.sum(is_before.to(tl.int32), 0), tile - tl.max(tl.where(is_before, ends, 0), 0)


# Each M, the number of tiles, would be a binary of its own.
@triton.jit(do_not_specialize=["num_tiles"])
def grouped_linear_kernel(
    x,
    weights,
    biases,
    out,
    pairs,
    firsts,
    tile_ends,
    num_tiles,
    N,
    D,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """Row p of `out` is x[p // FAN] times the weight of p's expert, whose address is `weights[expert]`."""
    num_n = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), num_tiles * num_n, tl.num_programs(0)):
        expert, tile_of_expert = _expert_of(tile // num_n, tile_ends, E, BLOCK_E)
        if expert < E:
            at = tl.load(firsts + expert) + tile_of_expert * BM + tl.arange(0, BM)
            is_row = at < tl.load(firsts + expert + 1)
            pair = tl.load(pairs + at, mask=is_row, other=0)
            n = tile % num_n * BN + tl.arange(0, BN)
            d = tl.arange(0, BD)
            element = tl.pointer_type(x.dtype.element_ty)
            weight = tl.multiple_of(tl.load(weights + expert).to(element), 16)
            x_at = x + (pair // FAN)[:, None] * D + d[None, :]
            weight_at = weight + n[None, :].to(tl.int64) * D + d[:, None]
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for first_d in range(0, D, BD):
                has_x, has_weight = is_row[:, None], n[None, :] < N
                if not EVEN_D:
                    has_x &= d[None, :] < D - first_d
                    has_weight &= d[:, None] < D - first_d
                x_part = tl.load(x_at + first_d, mask=has_x, other=0.0)
                weight_part = tl.load(weight_at + first_d, mask=has_weight, other=0.0)
                total = tl.dot(x_part, weight_part, total, input_precision="ieee")
            if HAS_BIAS:
                bias = tl.load(biases + expert).to(element)
                total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            out_at = out + pair[:, None] * N + n[None, :]
            tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row[:, None] & (n[None, :] < N))


@triton.jit
def _fp4_twice(codes):
    """Twice the numbers of FP4 (e2m1) with these codes: 0, 1, 2, 3, 4, 6, 8 or 12, negative from code 8 on."""
    magnitude = codes & 7
    large = (4 + 2 * (magnitude & 1)) << tl.maximum((magnitude >> 1) - 2, 0)
    magnitude = tl.where(magnitude < 4, magnitude, large)
    return tl.where(codes > 7, -magnitude, magnitude)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_codes_kernel(
    x,
    x_scales,
    x_sums,
    weights,
    scales,
    zeros,
    biases,
    out,
    pairs,
    firsts,
    tile_ends,
    num_tiles,
    N,
    D,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    GROUP_D: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    """As `grouped_linear_kernel`, with weights of 8 or 4 bits, summed group by group as `quantized_linear` does.

    x may be codes of 8 bits, with scales and, of integers, sums of codes; else it is multiplied as it is.
    """
    IS_FP8: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    HAS_INTEGERS: tl.constexpr = x.dtype.element_ty == tl.int8
    HAS_CODES: tl.constexpr = HAS_INTEGERS or IS_FP8
    middle: tl.constexpr = 1 << (BITS - 1)
    num_n, num_groups = tl.cdiv(N, BN), D // GROUP_D
    for tile in range(tl.program_id(0), num_tiles * num_n, tl.num_programs(0)):
        expert, tile_of_expert = _expert_of(tile // num_n, tile_ends, E, BLOCK_E)
        if expert < E:
            at = tl.load(firsts + expert) + tile_of_expert * BM + tl.arange(0, BM)
            is_row = at < tl.load(firsts + expert + 1)
            pair = tl.load(pairs + at, mask=is_row, other=0)
            row = pair // FAN
            n = tile % num_n * BN + tl.arange(0, BN)
            has_n = n < N
            d = tl.arange(0, BD)
            weight = tl.multiple_of(tl.load(weights + expert).to(tl.pointer_type(tl.uint8)), 16)
            scale_at = tl.load(scales + expert).to(tl.pointer_type(tl.float32)) + n * num_groups
            x_at = x + row[:, None] * D + d[None, :]
            if BITS == 4:
                weight_at = weight + n[:, None].to(tl.int64) * (D // 2) + tl.arange(0, BD // 2)[None, :]
            else:
                weight_at = weight + n[:, None].to(tl.int64) * D + d[None, :]
            if HAS_ZEROS:
                zeros_at = tl.load(zeros + expert).to(tl.pointer_type(tl.uint8)) + n * num_groups
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for group in range(num_groups):
                zero = tl.full((BN,), middle, dtype=tl.int16)
                if HAS_ZEROS and not HAS_CODES:
                    zero = tl.load(zeros_at + group, mask=has_n, other=0).to(tl.int16)
                sums = tl.zeros((BM, BN), dtype=tl.int32 if HAS_INTEGERS else tl.float32)
                if HAS_ZEROS and HAS_CODES:
                    shift = middle - tl.load(zeros_at + group, mask=has_n, other=0).to(tl.int32)
                    of_rows = tl.load(x_sums + row * num_groups + group, mask=is_row, other=0)
                    sums += of_rows[:, None] * shift[None, :]
                for first in range(group * GROUP_D, (group + 1) * GROUP_D, BD):
                    x_part = tl.load(x_at + first, mask=is_row[:, None], other=0 if HAS_INTEGERS else 0.0)
                    if BITS == 4:
                        halves = tl.load(weight_at + first // 2, mask=has_n[:, None], other=0)
                        codes = tl.interleave(halves & 15, halves >> 4).to(tl.int16)
                        numbers = _fp4_twice(codes) if IS_FLOAT else codes - middle
                    else:
                        codes = tl.load(weight_at + first, mask=has_n[:, None], other=0)
                        if IS_FLOAT:
                            numbers = codes.to(tl.float8e4nv, bitcast=True)
                        else:
                            numbers = codes.to(tl.int16) - middle
                    if HAS_INTEGERS:
                        sums = tl.dot(x_part, tl.trans(numbers.to(tl.int8)), sums, out_dtype=tl.int32)
                    elif IS_FP8:
                        sums = tl.dot(x_part, tl.trans(numbers), sums, max_num_imprecise_acc=BD)
                    else:
                        if HAS_ZEROS:
                            numbers += middle - zero[:, None]
                        if not IS_FLOAT or BITS == 4:
                            numbers = numbers.to(tl.float32)
                        numbers = numbers.to(x.dtype.element_ty)
                        sums = tl.dot(x_part, tl.trans(numbers), sums, input_precision="ieee")
                scale = tl.load(scale_at + group, mask=has_n, other=0.0)
                if HAS_CODES:
                    x_scale = tl.load(x_scales + row * num_groups + group, mask=is_row, other=0.0)
                    total += sums.to(tl.float32) * (x_scale[:, None] * scale[None, :])
                else:
                    total += sums * scale[None, :]
            if HAS_BIAS:
                bias = tl.load(biases + expert).to(tl.pointer_type(out.dtype.element_ty))
                total += tl.load(bias + n, mask=has_n, other=0.0).to(tl.float32)[None, :]
            out_at = out + pair[:, None] * N + n[None, :]
            tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row[:, None] & has_n[None, :])


@triton.jit
def sum_experts_kernel(y, weights, chosen, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """The weighted sum of a token's K rows of y in float32, by ascending index of the expert."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, last = tl.zeros((BLOCK,), dtype=tl.float32), -1
    for _ in range(K):
        expert, place = 1 << 30, 0
        for k in range(K):
            other = tl.load(chosen + token * K + k).to(tl.int32)
            is_next = (other > last) & (other < expert)
            expert, place = tl.where(is_next, other, expert), tl.where(is_next, k, place)
        part = tl.load(y + (token * K + place) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += part * tl.load(weights + token * K + place)
        last = expert
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=d < D)


@dataclass(frozen=True, slots=True)
class Codes:
    """How the weights of a `Stack` are quantized."""

    scales_E: torch.Tensor
    """Addresses of [N, G], float32."""
    zeros_E: torch.Tensor | None
    """Of [N, G], uint8."""
    bits: int
    group_size: int
    is_float: bool
    is_weight_only: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """The same linear layer of all experts, in one type. Each tensor is where it was loaded to."""

    weights_E: torch.Tensor
    """Addresses of [N, D], or of codes, int64."""
    biases_E: torch.Tensor | None
    """Of [N]."""
    shape: tuple[int, int]
    codes: Codes | None
    kept: Sequence[object] = field(repr=False)
    """What lies at the addresses."""


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where contiguous tensors of one device lie, int64, on that device."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


def tile_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """The rows of a tile, for as many as an expert has where all have equally many. A tile reads its weights once."""
    if dtype == torch.float32:
        return FLOAT32.m
    return FEW.m if num_pairs <= FEW.m * num_experts else MANY.m


def grouped_linear(
    x_SD: torch.Tensor,
    stack: Stack,
    groups: Groups,
    fan: int,
    num_processors: int,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return [P, N]: row p is x[p // fan] times the weight of p's expert, plus its bias.

    x and the result are of one type. A `tile` of another shape than the usual one has the rows of the groups.
    """
    (n, d), codes = stack.shape, stack.codes
    is_few = groups.tile_rows == FEW.m
    if tile is None and codes is not None:
        tile = CODES_FEW if is_few else CODES_MANY
    elif tile is None:
        tile = FLOAT32 if x_SD.dtype == torch.float32 else FEW if is_few else MANY
    assert tile.m == groups.tile_rows, (tile, groups.tile_rows)
    num_pairs, num_experts = len(groups.pairs_P), len(stack.weights_E)
    out_PN = torch.empty((num_pairs, n), dtype=x_SD.dtype, device=x_SD.device)
    grid = (min(num_processors * tile.num_programs, groups.max_tiles * triton.cdiv(n, tile.n)),)
    of_groups = groups.pairs_P, groups.firsts_E, groups.tile_ends_E, groups.max_tiles, n, d
    constants = {
        "E": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "FAN": fan,
        "BM": tile.m,
        "BN": tile.n,
        "HAS_BIAS": stack.biases_E is not None,
    }
    options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    if codes is None:
        grouped_linear_kernel[grid](
            x_SD,
            stack.weights_E,
            stack.biases_E,
            out_PN,
            *of_groups,
            **constants,
            BD=K_CHUNK,
            EVEN_D=d % K_CHUNK == 0,
            num_stages=tile.num_stages * 2 // x_SD.itemsize,
            **options,
        )
        return out_PN
    x: tuple[torch.Tensor | None, ...] = x_SD, None, None
    if not codes.is_weight_only:
        x = row_codes(x_SD, None, codes.group_size, is_float=codes.is_float and codes.bits == 8)
    grouped_codes_kernel[grid](
        *x,
        stack.weights_E,
        codes.scales_E,
        codes.zeros_E,
        stack.biases_E,
        out_PN,
        *of_groups,
        **constants,
        BD=math.gcd(codes.group_size, MOST_K[codes.bits]),
        GROUP_D=codes.group_size,
        BITS=codes.bits,
        HAS_ZEROS=codes.zeros_E is not None,
        IS_FLOAT=codes.is_float,
        num_stages=tile.num_stages,
        **options,
    )
    return out_PN


def sum_experts(y_PD: torch.Tensor, weights_TK: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """Return the sum [T, D] of each token's rows, times its weights, by ascending index of the expert."""
    (num_tokens, top_k), d = chosen_TK.shape, y_PD.shape[1]
    out_TD = torch.empty((num_tokens, d), dtype=y_PD.dtype, device=y_PD.device)
    sum_experts_kernel[(num_tokens, triton.cdiv(d, BLOCK))](
        y_PD,
        weights_TK.contiguous(),
        chosen_TK.contiguous(),
        out_TD,
        D=d,
        K=top_k,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TD
