"""One launch for the products of all experts, each with the rows of its tokens (grouped GEMM).

The slow twin is `shared.model.experts.multiply`. A tile has rows of one expert, and a row's sums are those of
`shared.kernels.triton.linear` whatever else is in its tile. That rows of one expert are brought together, with tiles
of a fixed height, is the idea of Triton's fused_moe in vLLM (https://github.com/vllm-project/vllm/pull/2453).

Shape suffixes: T tokens, K experts of a token, P = T * K pairs of both, E experts, L tiles of rows, N outputs, D
inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from shared.kernels.triton.linear import FEW, FLOAT32, K_CHUNK, Tile

MANY = Tile(64, 128, num_warps=8, num_stages=3)
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

    @classmethod
    def of(cls, chosen_TK: torch.Tensor, num_experts: int, tile_rows: int) -> Groups:
        """The groups of a choice, in tiles of at most so many rows."""
        experts_P, pairs_P = torch.sort(chosen_TK.flatten(), stable=True)
        bounds = torch.arange(num_experts + 1, device=chosen_TK.device)
        firsts_E = torch.searchsorted(experts_P, bounds)
        tile_ends_E = (-(firsts_E[:-1] - firsts_E[1:]).div(tile_rows, rounding_mode="floor")).cumsum(0)
        most = len(pairs_P) // tile_rows + min(num_experts, len(pairs_P))
        return cls(pairs_P, firsts_E, tile_ends_E, most)


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
class Stack:
    """The same linear layer of all experts, in one type. Each tensor is where it was loaded to."""

    weights_E: torch.Tensor
    """Addresses of [N, D], int64."""
    biases_E: torch.Tensor | None
    """Of [N]."""
    shape: tuple[int, int]
    kept: tuple[torch.Tensor, ...] = field(repr=False)
    """What lies at the addresses."""

    @classmethod
    def of(cls, weights_NK: Sequence[torch.Tensor], biases_N: Sequence[torch.Tensor] | None) -> Stack:
        """Of contiguous tensors that are aligned to 16 bytes."""
        device, (n, d) = weights_NK[0].device, weights_NK[0].shape

        def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)

        biases_E = None if biases_N is None else addresses(biases_N)
        return cls(addresses(weights_NK), biases_E, (n, d), (*weights_NK, *(biases_N or ())))


def tile_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """The tile for as many rows as an expert has where all have equally many. A tile reads its weights once."""
    rows = num_pairs / num_experts
    if dtype == torch.float32:
        return FLOAT32
    return FEW if rows <= FEW.m else MANY


def grouped_linear(
    x_SD: torch.Tensor, stack: Stack, groups: Groups, fan: int, tile: Tile, num_processors: int
) -> torch.Tensor:
    """Return [P, N]: row p is x[p // fan] times the weight of p's expert, plus its bias."""
    (n, d), num_pairs, num_experts = stack.shape, len(groups.pairs_P), len(stack.weights_E)
    out_PN = torch.empty((num_pairs, n), dtype=x_SD.dtype, device=x_SD.device)
    num_tiles = groups.max_tiles * triton.cdiv(n, tile.n)
    grouped_linear_kernel[(min(num_processors * tile.num_programs, num_tiles),)](
        x_SD,
        stack.weights_E,
        stack.biases_E,
        out_PN,
        groups.pairs_P,
        groups.firsts_E,
        groups.tile_ends_E,
        groups.max_tiles,
        n,
        d,
        E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        FAN=fan,
        BM=tile.m,
        BN=tile.n,
        BD=K_CHUNK,
        HAS_BIAS=stack.biases_E is not None,
        EVEN_D=d % K_CHUNK == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages * 2 // x_SD.itemsize,
        enable_fp_fusion=False,
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
