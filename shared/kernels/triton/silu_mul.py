"""The products of SwiGLU and GEGLU. Their slow twins are `silu_mul` and `gelu_mul` of `shared/model/layers.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements of the result that a program computes."""


@triton.jit
def gated_mul_kernel(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """Round silu(gate) or gelu(gate) to the type of the input before the product, as torch does."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    gate = tl.load(gate_up + row * 2 * F + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    x = gate
    if (
        IS_GELU
    ):  # (1 + tanh(x / 2)) / 2 is 1 / (1 + exp(-x)), with x = sqrt(8 / pi) * (gate + 0.044715 * gate ** 3)
        bounded = tl.maximum(gate, -10.0)  # where exp(-x) is nearly the largest number of float32
        x = bounded * (1.5957691216 + 0.0713548163 * bounded * bounded)
    gated = (gate / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(out + row * F + i, (gated * up).to(dtype), mask=inside)


def silu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, G / 2], of a contiguous tensor with gate first."""
    return _gated_mul(gate_up_TG, is_gelu=False)


def gelu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, as `silu_mul`, with GELU's approximation by tanh."""
    return _gated_mul(gate_up_TG, is_gelu=True)


def _gated_mul(gate_up_TG: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    num_rows, size = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
    out_TF = torch.empty((num_rows, size), dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    grid = (num_rows, triton.cdiv(size, BLOCK))
    gated_mul_kernel[grid](
        gate_up_TG, out_TF, F=size, BLOCK=BLOCK, IS_GELU=is_gelu, num_warps=4, enable_fp_fusion=False
    )
    return out_TF
