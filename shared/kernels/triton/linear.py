"""x W^T + bias with one order of sums for any number of rows: the products of `--exact`.

The slow twin is torch's `linear`. cuBLAS chooses among kernels, and with them the order of sums over K, by the number
of rows. Here each element of the result is one accumulator, to which chunks of K are added in their order, whatever
the shape of the tile is. `same_bits` shows on the GPU itself that all tiles agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

K_CHUNK = 64
GROUP = 8
"""Tiles of rows that share a column of weights before the next column, so that both come from the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the result that a program computes at a time, [m, n], and how."""

    m: int
    n: int
    num_warps: int
    num_stages: int
    """Chunks of K in shared memory of elements of two bytes. Of four bytes there are half as many: FLOAT32 has 3."""
    num_programs: int = 1
    """Of a multiprocessor, for as many bytes on their way as its memory needs. An H200 needs about 32 KB each."""

    @property
    def cost(self) -> int:
        """Time of one program: its products, or the elements that it reads from the L2 cache.

        A multiprocessor of an H100 reads one element in the time of 64 products in bfloat16.
        """
        return max(self.m * self.n, 64 * (self.m + self.n))


FEW = Tile(16, 32, num_warps=4, num_stages=8, num_programs=4)
"""For the fewest rows of a matrix instruction. Of four programs 96 KB of weights are on their way."""
NARROW = Tile(64, 32, num_warps=4, num_stages=6, num_programs=3)
"""For few rows: the weights are read once. Of three programs 60 KB of weights are on their way."""
MEDIUM = Tile(128, 128, num_warps=8, num_stages=3)
WIDE = Tile(128, 256, num_warps=8, num_stages=3)
TILES = (WIDE, MEDIUM, NARROW, FEW)
"""The largest first: of two that take the same time it reads less."""
FLOAT32 = Tile(64, 32, num_warps=8, num_stages=6)
"""For any number of rows. No matrix instruction has float32's precision, and larger tiles or fewer warps spill."""
_LARGE = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities for WIDE. Others have 100 KiB of shared memory for a program, or too few registers (sm_80)."""


def tiles_for(capability: tuple[int, int], dtype: torch.dtype) -> tuple[Tile, ...]:
    """The tiles that a GPU can compute without spilling registers."""
    if dtype == torch.float32:
        return (FLOAT32,)
    tiles = TILES if capability in _LARGE else TILES[1:]
    return tiles[:-1] if capability[0] == 10 else tiles  # sm_100 has other instructions for tiles of 64 rows


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Each program computes every num_programs-th tile."""
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        first_m = tile // (GROUP * num_n) * GROUP
        size_m = tl.minimum(num_m - first_m, GROUP)
        in_group = tile % (GROUP * num_n)
        m = (first_m + in_group % size_m) * BM + tl.arange(0, BM)
        n = in_group // size_m * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        x_at = x + m[:, None].to(tl.int64) * K + k[None, :]
        weight_at = weight + n[None, :].to(tl.int64) * K + k[:, None]
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for first_k in range(0, K, BK):
            has_x, has_weight = m[:, None] < M, n[None, :] < N
            if not EVEN_K:
                has_x &= k[None, :] < K - first_k
                has_weight &= k[:, None] < K - first_k
            x_part = tl.load(x_at + first_k, mask=has_x, other=0.0)
            weight_part = tl.load(weight_at + first_k, mask=has_weight, other=0.0)
            total = tl.dot(x_part, weight_part, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, tile: Tile, num_processors: int
) -> torch.Tensor:
    """Return x W^T + bias by tiles of one shape. All tensors are contiguous and of one type.

    K is the hidden size of a model, its intermediate size, or its heads times head_dim. One that is no multiple of 16
    makes rows that are not aligned. They are read element by element and spill registers: right, but slow.
    """
    (M, K), N = x_MK.shape, len(weight_NK)
    out_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    grid = (min(num_processors * tile.num_programs, triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n)),)
    linear_kernel[grid](
        x_MK,
        weight_NK,
        bias_N,
        out_MN,
        M,
        N,
        K,
        BM=tile.m,
        BN=tile.n,
        BK=K_CHUNK,
        GROUP=GROUP,
        HAS_BIAS=bias_N is not None,
        EVEN_K=K % K_CHUNK == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages * 2 // x_MK.itemsize,
        enable_fp_fusion=False,
    )
    return out_MN


@dataclass(frozen=True, slots=True)
class ExactLinear:
    """Chooses the tile by the number of rows and columns."""

    num_processors: int
    tiles: tuple[Tile, ...] = TILES

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> ExactLinear:
        """The products of a type on a GPU."""
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(num_processors, tiles_for(torch.cuda.get_device_capability(device), dtype))

    def __call__(
        self, x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x W^T + bias."""
        return linear(x_MK, weight_NK, bias_N, self.tile_for(len(x_MK), len(weight_NK)), self.num_processors)

    def tile_for(self, M: int, N: int) -> Tile:
        """The tile with which the busiest multiprocessor is done first. Few large tiles leave many without work."""
        for tile in reversed(self.tiles):
            if M <= tile.m <= NARROW.m:
                return tile

        def time(tile: Tile) -> int:
            num_tiles = -(-M // tile.m) * -(-N // tile.n)
            return -(-num_tiles // self.num_processors) * tile.cost

        return min(self.tiles, key=time)

    def same_bits(self, depths: Iterable[int], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether all tiles give the same bits on this GPU, for each K of `depths`, wherever a row is in its tile."""
        return all(self._same_bits(K, dtype, device) for K in depths)

    def _same_bits(self, K: int, dtype: torch.dtype, device: torch.device) -> bool:
        generator = torch.Generator().manual_seed(0)
        x_MK, weight_NK = (
            torch.randn(size, generator=generator, device="cpu").to(device, dtype)
            for size in ((160, K), (288, K))
        )
        expected_MN = linear(x_MK, weight_NK, None, self.tiles[-1], self.num_processors)
        return all(
            torch.equal(linear(x_MK[first:], weight_NK, None, tile, self.num_processors), expected_MN[first:])
            for tile in self.tiles
            for first in range(0, 160, 37)
        )
