"""One tile of a matrix product, whose number of rows and warps decides which tensor-core instruction computes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEPTH = 64


@triton.jit
def _tile_product(a_MK, b_KN, out_MN, K, M: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr):
    rows, columns, depths = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DEPTH)
    total = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        a = tl.load(a_MK + rows[:, None] * K + (first + depths)[None, :])
        b = tl.load(b_KN + (first + depths)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_MN + rows[:, None] * N + columns[None, :], total)


def tile_product(a_MK: torch.Tensor, b_KN: torch.Tensor, *, num_warps: int) -> torch.Tensor:
    """The product in float32, by one program. All sizes are powers of two."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    out_MN = torch.empty(M, N, dtype=torch.float32, device=a_MK.device)
    _tile_product[(1,)](
        a_MK, b_KN, out_MN, K, M=M, N=N, DEPTH=DEPTH, num_warps=num_warps, enable_fp_fusion=False
    )
    return out_MN
