"""How fast is each kernel beside torch's own operations, and against what the GPU can do?

Every figure is how many times as fast the kernel is. Shapes are those of an 8B; inputs rotate among buffers that are
larger than the L2 cache together, and launches are no part of the times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from shared.engine.future_map import FutureMap
from shared.engine.penalties import penalize
from shared.engine.sampling_inputs import PenaltyInputs
from shared.kernels.reference import write_kv
from shared.model import layers
from shared.model.rope import Rope
from shared.model.rotary import rotary_waves
from tests.backend_rig import batch_over, block_words
from tests.gpu.limits import measured
from tests.gpu.rows import figure
from tests.gpu.steps import Place, Report
from tests.gpu.timing import seconds_of

HIDDEN, FFN, HEADS, HEAD_DIM, VOCAB = 4096, 14_336, 32, 128, 128_256
PAGE_SIZE = 16
DRY = 128
"""A dry run has so many times smaller shapes, and the kernels in Triton's interpreter."""
ROTATE_NBYTES = 256 << 20
MOST_SETS = 64


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A kernel and what torch has for the same result. `nbytes` or `flops` are what the work needs at least."""

    what: str
    ours: Callable[[int], Any]
    theirs: Callable[[int], Any]
    nbytes: float = 0
    flops: float = 0


def run(place: Place, report: Report) -> None:
    """A row for each pair."""
    if place.is_dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    limits = measured(place)
    for pair in pairs(Tensors(place)):
        ours, theirs = (seconds_of(one, place.device) for one in (pair.ours, pair.theirs))
        limit_s = max(pair.nbytes / limits["copy_gb_s"] / 1e9, pair.flops / limits["gemm_tflop_s"] / 1e12)
        note = f"{1e6 * ours:.1f} us, {limit_s / ours:.2f} of the limit; torch {1e6 * theirs:.1f} us"
        report(
            figure(pair.what, theirs / ours, "x", note=note, ours_s=ours, theirs_s=theirs, limit_s=limit_s)
        )


@dataclass(frozen=True)
class Tensors:
    """Random inputs."""

    place: Place

    def size(self, full: int) -> int:
        """Of a dimension."""
        return max(full // DRY, 16) if self.place.is_dry else full

    @property
    def dtype(self) -> torch.dtype:
        """The interpreter's products in bfloat16 are wrong."""
        return torch.float32 if self.place.is_dry else torch.bfloat16

    def one(self, *sizes: int) -> torch.Tensor:
        """Of normal values."""
        return torch.randn(*sizes, device=self.place.device, dtype=self.dtype)

    def sets(self, *sizes: int, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """As many tensors as no cache holds."""
        one = torch.randn(*sizes, device=self.place.device, dtype=dtype or self.dtype)
        count = 1 if self.place.is_dry else min(MOST_SETS, -(-ROTATE_NBYTES // one.nbytes))
        return [one, *(torch.randn_like(one) for _ in range(count - 1))]


@dataclass(frozen=True)
class Attended:
    """New tokens of equal sequences, and the tokens that each has before them."""

    name: str
    sequences: int
    start: int
    length: int


ATTENDED = (
    Attended("decode, 1 of 2k", 1, 2047, 1),
    Attended("decode, 64 of 2k", 64, 2047, 1),
    Attended("decode, 256 of 2k", 256, 2047, 1),
    Attended("prefill, 2k", 1, 0, 2048),
    Attended("prefill, 8k", 1, 0, 8192),
    Attended("prefill, 512 behind 8k", 1, 8192, 512),
)


def pairs(tensors: Tensors) -> Iterator[Pair]:
    """Those of one decode step and of a chunk of a prompt. Each is made when the one before it is done."""
    for attended in ATTENDED:
        for exact in (False, True):
            yield attention(tensors, attended, exact=exact)
    for tokens in (64, tensors.size(8192)):
        yield norm(tensors, tokens)
        yield silu(tensors, tokens)
        yield rope_write(tensors, tokens)
        yield resolving(tensors, tokens)
    for tokens in (1, 64, tensors.size(256), tensors.size(2048)):
        yield product(tensors, tokens)
    for rows in (1, tensors.size(256)):
        yield penalties(tensors, rows)
        yield sampling(tensors, rows)
    for scatter in (False, True):
        yield page_copy(tensors, scatter=scatter)


def attention(tensors: Tensors, of: Attended, *, exact: bool) -> Pair:
    """One layer's attention over pages in random order, against torch's over K and V that lie together."""
    from shared.engine.cuda.triton_attention import TritonAttention
    from shared.kernels.triton.attention import PagedAttention

    small, place = tensors.place.is_dry, tensors.place
    sequences, heads = (2, 4) if small and of.sequences > 1 else (of.sequences, 4 if small else HEADS)
    kv_heads, start, length = heads // 4, of.start // (DRY if small else 1), tensors.size(of.length)
    length = 1 if of.length == 1 else length
    end = start + length
    kernel = PagedAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
        dtype=tensors.dtype,
        device=torch.device(place.device),
        exact=exact,
    )
    pages = -(-end // PAGE_SIZE)
    table_BP = (
        np.random.default_rng(0).permutation(sequences * pages).astype(np.int32).reshape(sequences, pages)
    )
    new = [0] * length
    extends = {} if length == 1 else dict.fromkeys(range(sequences), (start, new))
    decodes = dict.fromkeys(range(sequences), start) if length == 1 else {}
    batch = batch_over(table_BP, PAGE_SIZE, extends, decodes)
    work = TritonAttention(kernel).work(batch)
    words = block_words(batch, PAGE_SIZE, work).to(place.device)
    k_pages, v_pages = (tensors.one(sequences * pages, kv_heads, PAGE_SIZE, HEAD_DIM) for _ in range(2))
    q = tensors.one(sequences * length, heads, HEAD_DIM)
    q_BHLD = tensors.one(sequences, heads, length, HEAD_DIM)
    k, v = (tensors.one(sequences, kv_heads, end, HEAD_DIM) for _ in range(2))
    masked = start > 0 and length > 1
    seen = torch.ones(length, end, dtype=torch.bool, device=place.device).tril(start) if masked else None
    causal = start == 0
    return Pair(
        what=f"{'exact ' * exact}attention, {of.name}",
        ours=lambda i: kernel(q, k_pages, v_pages, words),
        theirs=lambda i: F.scaled_dot_product_attention(
            q_BHLD, k, v, attn_mask=seen, is_causal=causal, enable_gqa=True
        ),
        nbytes=2 * k.nbytes,
        flops=4 * sequences * heads * HEAD_DIM * (length * start + length * (length + 1) / 2),
    )


def page_copy(tensors: Tensors, *, scatter: bool) -> Pair:
    """A chunk of 16 pages of all layers into a slot or out of it, with its digest; torch's copy has none."""
    from shared.kernels.triton.pages import copy_pages

    device, num_pages = tensors.place.device, tensors.size(4096)
    rows = 4 if tensors.place.is_dry else 64
    page_nbytes = tensors.size(8 * PAGE_SIZE * HEAD_DIM * 2)
    pages = torch.randint(0, 255, (rows, num_pages, page_nbytes), dtype=torch.uint8, device=device)
    ids = torch.randperm(num_pages, device=device)[:16]
    block = torch.zeros(
        17 * (1 + rows) - rows, dtype=torch.int64, device="cpu", pin_memory=not tensors.place.is_dry
    )
    block[1:17] = ids
    slot = torch.zeros(rows, 16, page_nbytes, dtype=torch.uint8, device=device)
    pages_RPW, slot_RPW = pages.view(torch.int64), slot.view(torch.int64)
    return Pair(
        what=f"{'scatter' if scatter else 'gather'} of 16 pages, with a digest",
        ours=lambda i: copy_pages(pages, range(rows), slot, block, scatter=scatter),
        theirs=lambda i: (
            pages_RPW.index_copy_(1, ids, slot_RPW)
            if scatter
            else torch.index_select(pages_RPW, 1, ids, out=slot_RPW)
        ),
        nbytes=2 * slot.nbytes,
    )


def rope_write(tensors: Tensors, tokens: int) -> Pair:
    """Norm of q and k, rotation, and the write of k and v to their pages, behind the projection of a layer."""
    from shared.kernels.triton.rope import norm_rope_write

    heads, kv_heads = (8, 2) if tensors.place.is_dry else (HEADS, HEADS // 4)
    qkvs, num_pages = tensors.sets(tokens, heads + 2 * kv_heads, HEAD_DIM), -(-tokens // PAGE_SIZE)
    weight = tensors.one(heads + kv_heads, HEAD_DIM)
    k_pages, v_pages = (tensors.one(num_pages, kv_heads, PAGE_SIZE, HEAD_DIM) for _ in range(2))
    positions = torch.arange(tokens, device=tensors.place.device)
    at = torch.randperm(num_pages, device=positions.device)[positions // PAGE_SIZE], positions % PAGE_SIZE
    waves = rotary_waves(Rope(theta=10_000.0, rotary_dim=HEAD_DIM), HEAD_DIM, positions.device)
    cos, sin = layers.rotary_cos_sin(positions, waves, tensors.dtype)
    halves = tuple(one[:, 0, : HEAD_DIM // 2].contiguous() for one in (cos, sin))

    def by_torch(qkv: torch.Tensor) -> None:
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        _, k = torch.split(
            layers.apply_rotary(layers.rms_norm(qk, weight, 1e-5), cos, sin), [heads, kv_heads], dim=1
        )
        write_kv(k_pages, v_pages, k, v, *at)

    return Pair(
        what=f"QK-norm + RoPE + KV write, {tokens} tokens",
        ours=lambda i: norm_rope_write(
            qkvs[i % len(qkvs)], kv_heads, weight, 1e-5, *halves, *at, k_pages, v_pages
        ),
        theirs=lambda i: by_torch(qkvs[i % len(qkvs)]),
        nbytes=2 * qkvs[0].nbytes,
    )


def resolving(tensors: Tensors, tokens: int) -> Pair:
    """The input ids of a forward of which every second token is the last one of a row."""
    from shared.kernels.triton.resolve import resolve

    rows, device = 256, tensors.place.device
    future_map = FutureMap(rows, torch.device(device))
    ids = torch.arange(tokens, device=device)
    ids[::2] = -1 - ids[::2] % rows
    writes = torch.arange(0, rows, 4, device=device), torch.arange(0, rows, 4, device=device)
    return Pair(
        what=f"FutureMap resolve, {tokens} tokens",
        ours=lambda i: resolve(ids, *writes, future_map.last_token_R),
        theirs=lambda i: future_map.resolve(ids, *writes),
        nbytes=2.5 * ids.nbytes + 3 * writes[0].nbytes,
    )


def penalties(tensors: Tensors, rows: int) -> Pair:
    """All three penalties on every row."""
    from shared.kernels.triton import adjust

    vocab_size, device = tensors.size(VOCAB), tensors.place.device
    logits = tensors.sets(rows, vocab_size, dtype=torch.float32)
    counts = torch.randint(-2, 3, (rows, vocab_size), dtype=torch.int32, device=device).clamp_(min=0)
    is_known, entries = counts > 0, torch.arange(rows, device=device)
    ones = torch.ones(rows, device=device)
    inputs = PenaltyInputs(
        entries_P=entries,
        slots_P=entries,
        frequency_P=0.1 * ones,
        presence_P=0.1 * ones,
        repetition_P=1.1 * ones,
        num_slots=rows,
        anew=None,
    )
    of_rows = inputs.entries_P, inputs.slots_P, inputs.frequency_P, inputs.presence_P, inputs.repetition_P
    return Pair(
        what=f"penalties of {rows} rows",
        ours=lambda i: adjust.penalize(logits[i % len(logits)], *of_rows, counts, is_known),
        theirs=lambda i: penalize(logits[i % len(logits)], inputs, counts, is_known),
        nbytes=2 * logits[0].nbytes + counts.nbytes + is_known.nbytes,
    )


def norm(tensors: Tensors, tokens: int) -> Pair:
    """The residual stream before a layer."""
    from shared.kernels.triton.norm import add_norm

    hidden = tensors.size(HIDDEN)
    xs, residuals = tensors.sets(tokens, hidden), tensors.sets(tokens, hidden)
    weight, num = tensors.one(hidden), len(xs)
    return Pair(
        what=f"residual + RMSNorm, {tokens} tokens",
        ours=lambda i: add_norm(xs[i % num], residuals[i % num], weight, 1e-5),
        theirs=lambda i: F.rms_norm(residuals[i % num].add_(xs[i % num]), (hidden,), weight, 1e-5),
        nbytes=4 * xs[0].nbytes,
    )


def silu(tensors: Tensors, tokens: int) -> Pair:
    """The middle of an MLP."""
    from shared.kernels.triton.silu_mul import silu_mul

    gates = tensors.sets(tokens, 2 * tensors.size(FFN))
    return Pair(
        what=f"SiLU-mul, {tokens} tokens",
        ours=lambda i: silu_mul(gates[i % len(gates)]),
        theirs=lambda i: layers.silu_mul(gates[i % len(gates)]),
        nbytes=1.5 * gates[0].nbytes,
    )


def product(tensors: Tensors, tokens: int) -> Pair:
    """The largest product of --exact against cuBLAS's."""
    from shared.kernels.triton.linear import ExactLinear

    place = tensors.place
    exact = ExactLinear(3) if place.is_dry else ExactLinear.of(torch.device(place.device), torch.bfloat16)
    n, k = tensors.size(2 * FFN), tensors.size(HIDDEN)
    x, weights = tensors.one(tokens, k), tensors.sets(n, k)
    return Pair(
        what=f"exact product, {tokens} tokens",
        ours=lambda i: exact(x, weights[i % len(weights)]),
        theirs=lambda i: F.linear(x, weights[i % len(weights)]),
        nbytes=weights[0].nbytes + x.nbytes + tokens * n * x.itemsize,
        flops=2 * tokens * n * k,
    )


def sampling(tensors: Tensors, rows: int) -> Pair:
    """Top-k and top-p of every row, against a sort."""
    from shared.kernels.triton.sampling import Params, sample

    logits = tensors.sets(rows, tensors.size(VOCAB), dtype=torch.float32)
    device = tensors.place.device
    params = Params(
        temperatures_S=torch.full((rows,), 0.8, device=device),
        top_ks_S=torch.full((rows,), 50, device=device),
        top_ps_S=torch.full((rows,), 0.9, device=device),
        min_ps_S=torch.zeros(rows, device=device),
        uniforms_S=torch.rand(rows, dtype=torch.float64, device=device),
    )
    ids = torch.arange(rows, device=device)
    last = torch.zeros(rows, dtype=torch.int64, device=device)
    return Pair(
        what=f"sampling of {rows} rows",
        ours=lambda i: sample(logits[i % len(logits)], params, ids, last),
        theirs=lambda i: sort_and_sample(logits[i % len(logits)], 0.8, 50, 0.9),
        nbytes=logits[0].nbytes,
    )


def sort_and_sample(logits_SV: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The sampler that is made of torch's operations everywhere."""
    ordered, ids = torch.softmax(logits_SV / temperature, dim=-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered[:, top_k:] = 0.0
    ordered[before > top_p] = 0.0
    return ids.gather(1, torch.multinomial(ordered, 1))
