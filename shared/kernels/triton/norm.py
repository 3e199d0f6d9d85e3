"""RMSNorm of a sum. The slow twin is `rms_norm` of `shared/model/layers.py`, behind a torch addition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x, residual, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    """One program a row, so that the bits of a row do not depend on the others."""
    i = tl.arange(0, BLOCK)
    inside = i < D
    at = tl.program_id(0).to(tl.int64) * D + i
    dtype = x.dtype.element_ty
    total = tl.load(x + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual + at, mask=inside, other=0.0)
        total = (before.to(tl.float32) + total.to(tl.float32)).to(dtype)
        tl.store(residual + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    normed = (wide * scale).to(weight.dtype.element_ty).to(tl.float32)
    scaled = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32) * normed
    tl.store(out + at, scaled.to(dtype), mask=inside)


def add_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of residual + x, and that sum, which replaces the residual in its memory.

    Without a residual the sum is `x_TD`. All tensors are contiguous and of one type; the weight may be of float32.
    """
    num_rows, size = x_TD.shape
    out_TD = torch.empty_like(x_TD)
    block = triton.next_power_of_2(size)
    add_norm_kernel[(num_rows,)](
        x_TD,
        residual_TD,
        weight_D,
        out_TD,
        eps,
        D=size,
        BLOCK=block,
        HAS_RESIDUAL=residual_TD is not None,
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=False,
    )
    return out_TD, x_TD if residual_TD is None else residual_TD
