"""SwiGLU's product. The slow twin is `silu_mul` of `shared/model/layers.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements of the result that a program computes."""


@triton.jit
def silu_mul_kernel(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """Round silu(gate) to the type of the input before the product, as torch does."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    gate = tl.load(gate_up + row * 2 * F + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * F + i, (silu * up).to(dtype), mask=inside)


def silu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, G / 2], of a contiguous tensor with gate first."""
    num_rows, size = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
    out_TF = torch.empty((num_rows, size), dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    grid = (num_rows, triton.cdiv(size, BLOCK))
    silu_mul_kernel[grid](gate_up_TG, out_TF, F=size, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
    return out_TF
