"""Input ids of a forward from the FutureMap. The slow twin is `FutureMap` of `shared/engine/future_map.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Tokens that are resolved at a time."""


@triton.jit(do_not_specialize=["T", "W"])
def resolve_kernel(input_ids, write_rows, write_tokens, last_tokens, out, T, W, BLOCK: tl.constexpr):
    """One program, so that its barrier separates the writes from the reads."""
    i = tl.arange(0, BLOCK)
    for first in range(0, W, BLOCK):
        inside = first + i < W
        row = tl.load(write_rows + first + i, mask=inside, other=0)
        tl.store(last_tokens + row, tl.load(write_tokens + first + i, mask=inside, other=0), mask=inside)
    tl.debug_barrier()
    for first in range(0, T, BLOCK):
        inside = first + i < T
        token = tl.load(input_ids + first + i, mask=inside, other=0)
        of_row = tl.load(last_tokens - 1 - token, mask=inside & (token < 0), other=0)
        tl.store(out + first + i, tl.where(token < 0, of_row, token), mask=inside)


def resolve(
    input_ids_T: torch.Tensor,
    write_rows_W: torch.Tensor,
    write_tokens_W: torch.Tensor,
    last_token_R: torch.Tensor,
    block: int = BLOCK,
) -> torch.Tensor:
    """Write the tokens that the host knows, then return the ids, where -1 - row stands for the last token of a row.

    Everything is int64 and contiguous. No row is written twice but one that no id stands for.
    """
    out_T = torch.empty_like(input_ids_T)
    resolve_kernel[(1,)](
        input_ids_T,
        write_rows_W,
        write_tokens_W,
        last_token_R,
        out_T,
        len(input_ids_T),
        len(write_rows_W),
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return out_T
