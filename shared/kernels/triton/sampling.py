"""Logits to token ids. The slow twin is `shared/engine/sampler.py`.

A row is read by one program for each BLOCK of it: for its likeliest token, for a table of its octaves, and for the
few tokens from the octave of its threshold on. One program a row then finds the threshold and draws. An octave is the
probabilities from one power of two to the next, and the likeliest token has probability 1.

Nothing is sorted: thresholds are found by bisection over the bits of the probabilities, as in
`shared/kernels/cpu/src/sampling.cpp`. The bits of positive floats have the order of their values. Probabilities are
added up as integers, multiples of 2 ** -44. So a sum is the same in any order. All kernels compute a probability by
the same operations. Bits that differed all the same would cost a candidate, and no store or token out of range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits of a program. With twice as many the registers of the last one do not suffice on sm_120."""
FEW = 4096
"""Candidates for a threshold that are copied, so that the bisection reads only them."""
STAGES: tl.constexpr = tl.constexpr(4)
"""Reads of BLOCK logits that are on their way while the last program computes."""
LAST: tl.constexpr = tl.constexpr(45)
"""The octave from 2 ** -45 on. No token below has mass."""
OCTAVES: tl.constexpr = tl.constexpr(64)
"""LAST + 1, as a power of two."""
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
DRAW_OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


@triton.jit
def _probability(x, top, temperature):
    """exp((x - top) / temperature); 0 where logits are broken."""
    p = tl.exp(x / temperature - top / temperature)
    return tl.where(p <= 1.0, p, 0.0)


@triton.jit
def _mass(p):
    return (p * 17592186044416.0).to(tl.int64)  # 2 ** 44: the sum of 2 ** 18 tokens fits


@triton.jit
def _edge(octave):
    """The bits of the smallest probability of an octave."""
    return (127 - octave) << 23


@triton.jit
def _load(logits, first, V, top, temperature, BLOCK: tl.constexpr):
    v = first + tl.arange(0, BLOCK)
    return _probability(tl.load(logits + v, mask=v < V, other=-float("inf")), top, temperature)


@triton.jit
def _load_top(tops, num_blocks, NUM_BLOCKS: tl.constexpr):
    """The largest logit of a row."""
    blocks = tl.arange(0, NUM_BLOCKS)
    return tl.max(tl.load(tops + blocks, mask=blocks < num_blocks, other=-float("inf")), axis=0)


@triton.jit
def _load_table(table, num_blocks, NUM_BLOCKS: tl.constexpr):
    """Counts or masses of a row from each octave's edge on, [NUM_BLOCKS, OCTAVES]."""
    at = tl.arange(0, NUM_BLOCKS)[:, None] * OCTAVES + tl.arange(0, OCTAVES)[None, :]
    return tl.load(table + at, mask=at < num_blocks * OCTAVES, other=0)


@triton.jit
def _at(values, i, COUNT: tl.constexpr):
    """Element `i` of COUNT values; 0 where there is none."""
    return tl.sum(tl.where(tl.arange(0, COUNT) == i, values, 0), axis=0)


@triton.jit
def _first_octave(above, limit):
    """The first octave from whose edge on there is at least `limit`, or LAST."""
    return tl.sum(((above < limit) & (tl.arange(0, OCTAVES) < LAST)).to(tl.int32), axis=0)


@triton.jit
def _least_mass(top_p, left):
    """The least mass that is at least `top_p` of `left`."""
    share = top_p.to(tl.float64) * left.to(tl.float64)
    least = share.to(tl.int64)
    return least + (least.to(tl.float64) < share).to(tl.int64)


@triton.jit
def _first_candidate(counts, masses, V, top_k, top_p, min_p):
    """The octave that the threshold of a row is not below. LAST where it has none."""
    octave = tl.minimum(tl.maximum(127 - (min_p.to(tl.int32, bitcast=True) >> 23), 0), LAST)
    if (top_k > 0) & (top_k < V):
        octave = _first_octave(counts, top_k)
    elif top_p < 1.0:
        octave = _first_octave(masses, _least_mass(top_p, _at(masses, LAST, OCTAVES)))
    return octave


@triton.jit
def top_kernel(logits, tops, likeliest, V, BLOCK: tl.constexpr):
    """The largest logit of each block [S, blocks], and its token, the lowest id among equals."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + v, mask=v < V, other=-float("inf"))
    top = tl.max(x, axis=0)
    out = row * tl.num_programs(0) + block
    tl.store(tops + out, top)
    tl.store(likeliest + out, tl.min(tl.where(x == top, v, V - 1), axis=0))


@triton.jit
def octaves_kernel(
    logits, temperatures, tops, counts, masses, V, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr
):
    """How many tokens of each block are from each octave's edge on, and their mass: [S, blocks, OCTAVES]."""
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        top = _load_top(tops + row * num_blocks, num_blocks, NUM_BLOCKS)
        p = _load(logits + row * V, block * BLOCK, V, top, temperature, BLOCK)
        mass = _mass(p)
        octaves = tl.arange(0, OCTAVES)
        count_of = tl.zeros((OCTAVES,), dtype=tl.int32)
        mass_of = tl.zeros((OCTAVES,), dtype=tl.int64)
        for octave in range(LAST + 1):
            above = p.to(tl.int32, bitcast=True) >= _edge(octave)
            count_of = tl.where(octaves == octave, tl.sum(above.to(tl.int32), axis=0), count_of)
            mass_of = tl.where(octaves == octave, tl.sum(tl.where(above, mass, 0), axis=0), mass_of)
        out = (row * num_blocks + block) * OCTAVES + octaves
        tl.store(counts + out, count_of)
        tl.store(masses + out, mass_of)


@triton.jit
def candidates_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, tops, counts, masses, few, few_ids, V,
    BLOCK: tl.constexpr, FEW: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Copy the probabilities and ids of a row's candidates, by id, if they are at most FEW."""
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        count_of = _load_table(counts + row * num_blocks * OCTAVES, num_blocks, NUM_BLOCKS)
        mass_of = _load_table(masses + row * num_blocks * OCTAVES, num_blocks, NUM_BLOCKS)
        octave = _first_candidate(
            tl.sum(count_of, axis=0),
            tl.sum(mass_of, axis=0),
            V,
            tl.load(top_ks + row),
            tl.load(top_ps + row),
            tl.load(min_ps + row),
        )
        of_octave = tl.sum(tl.where(tl.arange(0, OCTAVES)[None, :] == octave, count_of, 0), axis=1)
        if tl.sum(of_octave, axis=0) <= FEW:
            top = _load_top(tops + row * num_blocks, num_blocks, NUM_BLOCKS)
            p = _load(logits + row * V, block * BLOCK, V, top, temperature, BLOCK)
            chosen = p.to(tl.int32, bitcast=True) >= _edge(octave)
            before = tl.sum(tl.where(tl.arange(0, NUM_BLOCKS) < block, of_octave, 0), axis=0)
            place = before + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            stored = chosen & (place < FEW)
            tl.store(few + row * FEW + place, p, mask=stored)
            tl.store(few_ids + row * FEW + place, block * BLOCK + tl.arange(0, BLOCK), mask=stored)


@triton.jit
def _above(logits, V, top, temperature, pivot, BLOCK: tl.constexpr):
    """The number and the mass of the tokens likelier than `pivot`."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.int64)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        p = _load(logits, first, V, top, temperature, BLOCK)
        count += (p > pivot).to(tl.int32)
        mass += tl.where(p > pivot, _mass(p), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _cut(
    logits, V, top, temperature, few, num_few, counts, masses, limit,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The smallest probability with less than `limit` above it, by count or by mass, and what is above it.

    It is between 2 ** -45 and 1. `few` has `num_few` candidates. If they were more than FEW, those of a narrower
    range are copied there.
    """
    octave = _first_octave(masses if BY_MASS else counts, limit)
    low = _edge(octave)
    high = tl.minimum(_edge(octave - 1) - 1, 0x3F800000)  # bits of 1
    from_low = _at(counts, octave, OCTAVES)
    count_above = _at(counts, octave - 1, OCTAVES)  # of the tokens likelier than `high`
    mass_above = _at(masses, octave - 1, OCTAVES)
    count_left_out = tl.full((), 0, tl.int32)
    mass_left_out = tl.full((), 0, tl.int64)
    if num_few > FEW:
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
        count_left_out = count_above
        mass_left_out = mass_above
        num_few = 0
        if low < high:
            tl.debug_barrier()  # an earlier cut has read `few`
            for first in tl.range(0, V, BLOCK, num_stages=STAGES):
                p = _load(logits, first, V, top, temperature, BLOCK)
                bits = p.to(tl.int32, bitcast=True)
                chosen = (bits >= low) & (bits <= high)
                place = num_few + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
                tl.store(few + place, p, mask=chosen & (place < FEW))
                num_few += tl.sum(chosen.to(tl.int32), axis=0)
            tl.debug_barrier()
    i = tl.arange(0, FEW)
    p = tl.load(few + i, mask=i < num_few, other=0.0)
    mass_of = _mass(p)
    while low < high:
        middle = low + (high - low) // 2
        likelier = p > middle.to(tl.float32, bitcast=True)
        count = count_left_out + tl.sum(likelier.to(tl.int32), axis=0)
        mass = mass_left_out + tl.sum(tl.where(likelier, mass_of, 0), axis=0)
        if (mass if BY_MASS else count) < limit:
            high = middle
            count_above = count
            mass_above = mass
        else:
            low = middle + 1
    return high.to(tl.float32, bitcast=True), count_above, mass_above


@triton.jit
def _threshold(
    logits, V, top, temperature, few, num_few, counts, masses, top_k, top_p, min_p,
    BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Top-k, then top-p of the mass that is left, and min-p."""
    lowest = min_p
    left = _at(masses, LAST, OCTAVES)
    if (top_k > 0) & (top_k < V):
        at, count, mass = _cut(
            logits, V, top, temperature, few, num_few, counts, masses, top_k, False, BLOCK, FEW
        )
        lowest = tl.maximum(lowest, at)
        left = mass + (top_k - count) * _mass(at)  # of exactly top_k tokens, with ties too
    if top_p < 1.0:
        least = _least_mass(top_p, left)
        at, _, _ = _cut(logits, V, top, temperature, few, num_few, counts, masses, least, True, BLOCK, FEW)
        lowest = tl.maximum(lowest, at)
    return lowest


@triton.jit
def _target(uniform, total):
    """The mass before the token to draw is at most this."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit(do_not_specialize=["num_blocks"])  # 1 would be another binary
def draw_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tops, likeliest, counts, masses, few, few_ids,
    rows, last_tokens, token_ids, V, num_blocks,
    ALL_GREEDY: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The likeliest token, the lowest id among equals, or a draw where the temperature is not 0.

    A draw is the first id at which the mass of the tokens from the threshold on exceeds a uniform share of it all.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, NUM_BLOCKS)
    is_block = blocks < num_blocks
    top_of = tl.load(tops + row * num_blocks + blocks, mask=is_block, other=-float("inf"))
    top = tl.max(top_of, axis=0)
    token = tl.load(likeliest + row * num_blocks + blocks, mask=is_block & (top_of == top), other=V - 1)
    token = tl.min(token, axis=0)
    if not ALL_GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            logits += row * V
            few += row * FEW
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            min_p = tl.load(min_ps + row)
            uniform = tl.load(uniforms + row)
            count_of = tl.sum(
                _load_table(counts + row * num_blocks * OCTAVES, num_blocks, NUM_BLOCKS), axis=0
            )
            masses += row * num_blocks * OCTAVES
            mass_of = tl.sum(_load_table(masses, num_blocks, NUM_BLOCKS), axis=0)
            octave = _first_candidate(count_of, mass_of, V, top_k, top_p, min_p)
            num_few = _at(count_of, octave, OCTAVES)
            lowest = _threshold(
                logits, V, top, temperature, few, num_few, count_of, mass_of, top_k, top_p, min_p, BLOCK, FEW
            )
            if num_few <= FEW:
                i = tl.arange(0, FEW)
                p = tl.load(few + i, mask=i < num_few, other=0.0)
                mass = tl.where(p >= lowest, _mass(p), 0)
                total = tl.sum(mass, axis=0)
                if total > 0:
                    at = tl.sum((tl.cumsum(mass, axis=0) <= _target(uniform, total)).to(tl.int32), axis=0)
                    token = tl.load(few_ids + row * FEW + at)
            else:
                mass_in = tl.load(masses + blocks * OCTAVES + LAST, mask=is_block, other=0)
                if lowest > 0:
                    for block in tl.range(num_blocks, num_stages=STAGES):
                        p = _load(logits, block * BLOCK, V, top, temperature, BLOCK)
                        mass = tl.sum(tl.where(p >= lowest, _mass(p), 0), axis=0)
                        mass_in = tl.where(blocks == block, mass, mass_in)
                total = tl.sum(mass_in, axis=0)
                if total > 0:  # broken logits have no mass
                    target = _target(uniform, total)
                    block = tl.sum((tl.cumsum(mass_in, axis=0) <= target).to(tl.int32), axis=0)
                    before = tl.sum(tl.where(blocks < block, mass_in, 0), axis=0)
                    p = _load(logits, block * BLOCK, V, top, temperature, BLOCK)
                    up_to = before + tl.cumsum(tl.where(p >= lowest, _mass(p), 0), axis=0)
                    token = block * BLOCK + tl.sum((up_to <= target).to(tl.int32), axis=0)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
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
    num_blocks = triton.cdiv(vocab_size, block)
    token_ids_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    tops_SB = logits_SV.new_empty((num_rows, num_blocks))
    likeliest_SB = torch.empty_like(tops_SB, dtype=torch.int32)
    counts_SBO = masses_SBO = few_SF = few_ids_SF = None
    grid = (num_blocks, num_rows)
    constants = {"BLOCK": block, "NUM_BLOCKS": triton.next_power_of_2(num_blocks)}
    top_kernel[grid](logits_SV, tops_SB, likeliest_SB, vocab_size, BLOCK=block, **OPTIONS)
    if params is not None:
        counts_SBO = tops_SB.new_empty((*tops_SB.shape, OCTAVES.value), dtype=torch.int32)
        masses_SBO = torch.empty_like(counts_SBO, dtype=torch.int64)
        few_SF = logits_SV.new_empty((num_rows, few))
        few_ids_SF = torch.empty_like(few_SF, dtype=torch.int32)
        table = tops_SB, counts_SBO, masses_SBO
        octaves_kernel[grid](logits_SV, params.temperatures_S, *table, vocab_size, **constants, **OPTIONS)
        candidates_kernel[grid](
            logits_SV, *params[:4], *table, few_SF, few_ids_SF, vocab_size, FEW=few, **constants, **OPTIONS
        )
    draw_kernel[(num_rows,)](
        logits_SV,
        *(params or [None] * 5),
        tops_SB,
        likeliest_SB,
        counts_SBO,
        masses_SBO,
        few_SF,
        few_ids_SF,
        rows_S,
        last_token_R,
        token_ids_S,
        vocab_size,
        num_blocks,
        ALL_GREEDY=params is None,
        FEW=few,
        **constants,
        **DRAW_OPTIONS,
    )
    return token_ids_S
