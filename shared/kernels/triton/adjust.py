"""Penalties, biases, tokens that may not be drawn and vocab masks, applied to logits in place.

The slow twins are `penalize` of `shared/engine/penalties.py`, and `adjust_logits` and `apply_vocab_mask` of
`shared/engine/sampling_inputs.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LIST = 1024
"""Biases or tokens that are applied at a time."""


@triton.jit
def penalize_kernel(
    logits,
    entries,
    slots,
    frequency,
    presence,
    repetition,
    num_output,
    is_known,
    V,
    BLOCK: tl.constexpr,
):
    """A program has BLOCK logits of one sequence."""
    p = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    x_at = logits + tl.load(entries + p) * V + v
    count_at = tl.load(slots + p) * V + v
    x = tl.load(x_at, mask=inside, other=0.0)
    by = tl.load(repetition + p)
    repeated = tl.where(x > 0, tl.div_rn(x, by + tl.zeros_like(x)), x * by)
    x = tl.where(tl.load(is_known + count_at, mask=inside, other=0) != 0, repeated, x)
    count = tl.load(num_output + count_at, mask=inside, other=0)
    x = x - tl.load(frequency + p) * count.to(tl.float32)
    x = x - tl.where(count > 0, tl.load(presence + p), 0.0)
    tl.store(x_at, x, mask=inside)


@triton.jit(do_not_specialize=["num_biases", "num_masked"])
def bias_kernel(
    logits,
    bias_entries,
    bias_ids,
    bias_values,
    num_biases,
    masked_entries,
    masked_ids,
    num_masked,
    V,
    LIST: tl.constexpr,
):
    """One program, whose barrier keeps a masked token from getting a bias again."""
    i = tl.arange(0, LIST)
    for first in range(0, num_biases, LIST):
        inside = first + i < num_biases
        entry = tl.load(bias_entries + first + i, mask=inside, other=0)
        at = logits + entry * V + tl.load(bias_ids + first + i, mask=inside, other=0)
        value = tl.load(bias_values + first + i, mask=inside, other=0.0)
        tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)
    tl.debug_barrier()
    for first in range(0, num_masked, LIST):
        inside = first + i < num_masked
        entry = tl.load(masked_entries + first + i, mask=inside, other=0)
        at = logits + entry * V + tl.load(masked_ids + first + i, mask=inside, other=0)
        tl.store(at, tl.full((LIST,), -float("inf"), tl.float32), mask=inside)


@triton.jit
def _is_allowed(words, v, V):
    return ((tl.load(words + v // 32, mask=v < V, other=0) >> (v % 32)) & 1) != 0


@triton.jit
def vocab_mask_kernel(logits, entries, allowed, V, W, BLOCK: tl.constexpr):
    """One program a masked row. Where nothing is left, all allowed tokens get the same logit."""
    g = tl.program_id(0)
    logits += tl.load(entries + g) * V
    words = allowed + g.to(tl.int64) * W
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < V, other=-float("inf"))
        x = tl.where(_is_allowed(words, v, V), x, -float("inf"))
        tl.store(logits + v, x, mask=v < V)
        best = tl.maximum(best, x)
    if tl.max(best, axis=0) == -float("inf"):
        tl.debug_barrier()
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            tl.store(logits + v, tl.zeros((BLOCK,), tl.float32), mask=_is_allowed(words, v, V))


def penalize(
    logits_SV: torch.Tensor,
    entries_P: torch.Tensor,
    slots_P: torch.Tensor,
    frequency_P: torch.Tensor,
    presence_P: torch.Tensor,
    repetition_P: torch.Tensor,
    num_output_NV: torch.Tensor,
    is_known_NV: torch.Tensor,
    block: int = 1024,
) -> None:
    """Penalize rows `entries_P` of float32 logits by the counts of `slots_P`, int32 and bool, in place."""
    vocab_size = logits_SV.shape[1]
    penalize_kernel[(len(entries_P), triton.cdiv(vocab_size, block))](
        logits_SV,
        entries_P,
        slots_P,
        frequency_P,
        presence_P,
        repetition_P,
        num_output_NV,
        is_known_NV.view(torch.uint8),
        vocab_size,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )


def add_biases(
    logits_SV: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    masked: tuple[torch.Tensor, torch.Tensor] | None,
    size: int = LIST,
) -> None:
    """Add biases (rows, token ids, values) to float32 logits, then set those of `masked` to -inf, in place.

    Rows and ids are int64, values float32.
    """
    ids = torch.empty(0, dtype=torch.int64, device=logits_SV.device)
    biases, masked = biases or (ids, ids, logits_SV.new_empty(0)), masked or (ids, ids)
    bias_kernel[(1,)](
        logits_SV,
        *biases,
        len(biases[0]),
        *masked,
        len(masked[0]),
        logits_SV.shape[1],
        LIST=size,
        num_warps=8,
        enable_fp_fusion=False,
    )


def apply_vocab_mask(
    logits_SV: torch.Tensor, entries_G: torch.Tensor, allowed_GW: torch.Tensor, block: int
) -> None:
    """Set the logits of rows `entries_G` whose bit of `allowed_GW` (int32) is 0 to -inf, in place.

    A row that is left without a token gets 0 for every allowed one. A program has one row, `block` logits at a time.
    """
    vocab_mask_kernel[(len(entries_G),)](
        logits_SV,
        entries_G,
        allowed_GW,
        logits_SV.shape[1],
        allowed_GW.shape[1],
        BLOCK=block,
        num_warps=16,
        enable_fp_fusion=False,
    )
