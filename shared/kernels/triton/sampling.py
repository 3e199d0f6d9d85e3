"""Logits to token ids, one program a row. The slow twin is `shared/engine/sampler.py`.

Nothing is sorted: thresholds are found by bisection over the bits of the probabilities, as in
`shared/kernels/cpu/src/sampling.cpp`. The bits of positive floats have the order of their values. Probabilities are
scaled so that the likeliest is 1, and added up as integers, multiples of 2 ** -44. So a sum is the same in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits that a program reads at a time. With twice as many its registers do not suffice on sm_120."""
STAGES: tl.constexpr = tl.constexpr(4)
"""Reads of BLOCK logits that are on their way while a program computes."""
FEW = 4096
"""Candidates for a threshold that are copied, so that the rest of the bisection reads only them."""


@triton.jit
def _probability(x, top, temperature):
    """exp((x - top) / temperature); 0 where logits are broken."""
    p = tl.exp(x / temperature - top / temperature)
    return tl.where(p <= 1.0, p, 0.0)


@triton.jit
def _mass(p):
    return (p * 17592186044416.0).to(tl.int64)  # 2 ** 44: the sum of 2 ** 18 tokens fits


@triton.jit
def _load(logits, first, V, top, temperature, BLOCK: tl.constexpr):
    v = first + tl.arange(0, BLOCK)
    return _probability(tl.load(logits + v, mask=v < V, other=-float("inf")), top, temperature)


@triton.jit
def _above(logits, V, top, temperature, pivot, BLOCK: tl.constexpr):
    """The number and the mass of the tokens likelier than `pivot`."""
    count = tl.zeros((BLOCK,), dtype=tl.int64)
    mass = tl.zeros((BLOCK,), dtype=tl.int64)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        p = _load(logits, first, V, top, temperature, BLOCK)
        count += (p > pivot).to(tl.int64)
        mass += tl.where(p > pivot, _mass(p), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _cut(
    logits, V, top, temperature, scratch, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr
):
    """The smallest probability with less than `limit` above it, by count or by mass, and what is above it.

    It is between 2 ** -45, below which no token has mass, and 1.
    """
    low = tl.full((), 0x29000000, tl.int32)  # bits of 2 ** -45
    high = tl.full((), 0x3F800000, tl.int32)  # bits of 1
    from_low = tl.full((), 0, tl.int64) + V  # at least the number of tokens from `low` on
    count_above = tl.full((), 0, tl.int64)  # of the tokens likelier than `high`
    mass_above = tl.full((), 0, tl.int64)
    while (low < high) & (from_low - count_above > FEW):
        middle = low + (high - low) // 2
        count, mass = _above(logits, V, top, temperature, middle.to(tl.float32, bitcast=True), BLOCK)
        if (mass if BY_MASS else count) < limit:
            high = middle
            count_above = count
            mass_above = mass
        else:
            low = middle + 1
            from_low = count
    if low < high:
        num_few = tl.full((), 0, tl.int32)
        tl.debug_barrier()  # an earlier cut has read `scratch`
        for first in tl.range(0, V, BLOCK, num_stages=STAGES):
            p = _load(logits, first, V, top, temperature, BLOCK)
            bits = p.to(tl.int32, bitcast=True)
            chosen = (bits >= low) & (bits <= high)
            place = num_few + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(scratch + place, p, mask=chosen)
            num_few += tl.sum(chosen.to(tl.int32), axis=0)
        tl.debug_barrier()
        i = tl.arange(0, FEW)
        few = tl.load(scratch + i, mask=i < num_few, other=0.0)
        few_mass = _mass(few)
        count_left_out = count_above
        mass_left_out = mass_above
        while low < high:
            middle = low + (high - low) // 2
            likelier = few > middle.to(tl.float32, bitcast=True)
            count = count_left_out + tl.sum(likelier.to(tl.int64), axis=0)
            mass = mass_left_out + tl.sum(tl.where(likelier, few_mass, 0), axis=0)
            if (mass if BY_MASS else count) < limit:
                high = middle
                count_above = count
                mass_above = mass
            else:
                low = middle + 1
    return high.to(tl.float32, bitcast=True), count_above, mass_above


@triton.jit
def _threshold(
    logits, V, top, temperature, scratch, top_k, top_p, min_p, BLOCK: tl.constexpr, FEW: tl.constexpr
):
    """Top-k, then top-p of the mass that is left, and min-p; the likeliest token has probability 1."""
    lowest = min_p
    has_k = (top_k > 0) & (top_k < V)
    left = tl.full((), 0, tl.int64)
    if has_k:
        at, count, mass = _cut(logits, V, top, temperature, scratch, top_k, False, BLOCK, FEW)
        lowest = tl.maximum(lowest, at)
        left = mass + (top_k - count) * _mass(at)  # of exactly top_k tokens, with ties too
    if top_p < 1.0:
        if not has_k:
            _, left = _above(logits, V, top, temperature, 0.0, BLOCK)
        share = top_p.to(tl.float64) * left.to(tl.float64)
        limit = share.to(tl.int64)
        limit += (limit.to(tl.float64) < share).to(tl.int64)  # mass < limit where it is less than the share
        at, _, _ = _cut(logits, V, top, temperature, scratch, limit, True, BLOCK, FEW)
        lowest = tl.maximum(lowest, at)
    return lowest


@triton.jit
def _draw(
    logits, V, top, temperature, lowest, uniform, likeliest, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr
):
    """The first id at which the mass of the tokens from `lowest` on exceeds `uniform` of it all."""
    blocks = tl.arange(0, NUM_BLOCKS)
    mass_of = tl.zeros((NUM_BLOCKS,), dtype=tl.int64)
    for block in tl.range(tl.cdiv(V, BLOCK), num_stages=STAGES):
        p = _load(logits, block * BLOCK, V, top, temperature, BLOCK)
        mass = tl.sum(tl.where(p >= lowest, _mass(p), 0), axis=0)
        mass_of = tl.where(blocks == block, mass, mass_of)
    total = tl.sum(mass_of, axis=0)
    token = likeliest  # broken logits have no mass
    if total > 0:
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        block = tl.sum((tl.cumsum(mass_of, axis=0) <= target).to(tl.int32), axis=0)
        before = tl.sum(tl.where(blocks < block, mass_of, 0), axis=0)
        p = _load(logits, block * BLOCK, V, top, temperature, BLOCK)
        up_to = before + tl.cumsum(tl.where(p >= lowest, _mass(p), 0), axis=0)
        token = block * BLOCK + tl.sum((up_to <= target).to(tl.int32), axis=0)
    return token


@triton.jit
def sample_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    scratch,
    rows,
    last_tokens,
    token_ids,
    V,
    ALL_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """The likeliest token, the lowest id among equals, or a draw where the temperature is not 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_at = tl.arange(0, BLOCK)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < V, other=-float("inf"))
        best_at = tl.where(x > best, v, best_at)
        best = tl.maximum(x, best)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_at, V - 1), axis=0)
    if not ALL_GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            lowest = _threshold(
                logits,
                V,
                top,
                temperature,
                scratch + row * FEW,
                tl.load(top_ks + row),
                tl.load(top_ps + row),
                tl.load(min_ps + row),
                BLOCK,
                FEW,
            )
            uniform = tl.load(uniforms + row)
            token = _draw(logits, V, top, temperature, lowest, uniform, token, BLOCK, NUM_BLOCKS)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(last_tokens + tl.load(rows + row), token.to(tl.int64))


class Params(NamedTuple):
    """Of S rows, on the device: int64 top-k, float64 uniforms, and float32. A greedy row has temperature 0."""

    temperatures_S: torch.Tensor
    top_ks_S: torch.Tensor
    top_ps_S: torch.Tensor
    min_ps_S: torch.Tensor
    uniforms_S: torch.Tensor


def sample(
    logits_SV: torch.Tensor,
    params: Params | None,
    rows_S: torch.Tensor,
    last_token_R: torch.Tensor,
    block: int = BLOCK,
    few: int = FEW,
) -> torch.Tensor:
    """Return the next token ids, int64 [S], which are also written to `last_token_R[rows_S]`.

    Without `params` every row takes its likeliest token. `logits_SV` is float32 and contiguous. `block` and `few`
    decide about the time that it takes, and not about the result.
    """
    num_rows, vocab_size = logits_SV.shape
    token_ids_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    sample_kernel[(num_rows,)](
        logits_SV,
        *(params or [None] * 5),
        None if params is None else logits_SV.new_empty((num_rows, few)),
        rows_S,
        last_token_R,
        token_ids_S,
        vocab_size,
        ALL_GREEDY=params is None,
        BLOCK=block,
        FEW=few,
        NUM_BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        num_warps=16,
        enable_fp_fusion=False,
    )
    return token_ids_S
