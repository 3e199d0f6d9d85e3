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

from tests.backend_rig import batch_over
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
        yield attention(tensors, attended)
    for tokens in (64, tensors.size(8192)):
        yield norm(tensors, tokens)
        yield silu(tensors, tokens)
    for tokens in (1, 64, tensors.size(256), tensors.size(2048)):
        yield product(tensors, tokens)
    for rows in (1, tensors.size(256)):
        yield sampling(tensors, rows)
    yield gather(tensors)


def attention(tensors: Tensors, of: Attended) -> Pair:
    """One layer's attention over pages in random order, against torch's over K and V that lie together."""
    from shared.engine.triton_attention import TritonAttention
    from shared.kernels.triton.attention import PagedAttention
    from shared.kernels.triton.attention_work import block_words

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
    words = torch.from_numpy(block_words(batch.page_table_BP, work)).to(place.device)
    k_pages, v_pages = (tensors.one(sequences * pages, kv_heads, PAGE_SIZE, HEAD_DIM) for _ in range(2))
    q = tensors.one(sequences * length, heads, HEAD_DIM)
    q_BHLD = tensors.one(sequences, heads, length, HEAD_DIM)
    k, v = (tensors.one(sequences, kv_heads, end, HEAD_DIM) for _ in range(2))
    masked = start > 0 and length > 1
    seen = torch.ones(length, end, dtype=torch.bool, device=place.device).tril(start) if masked else None
    causal = start == 0
    return Pair(
        what=f"attention, {of.name}",
        ours=lambda i: kernel(q, k_pages, v_pages, words),
        theirs=lambda i: F.scaled_dot_product_attention(
            q_BHLD, k, v, attn_mask=seen, is_causal=causal, enable_gqa=True
        ),
        nbytes=2 * k.nbytes,
        flops=4 * sequences * heads * HEAD_DIM * (length * start + length * (length + 1) / 2),
    )


def gather(tensors: Tensors) -> Pair:
    """A chunk of 16 pages of all layers into a slot with its digest, against torch's copy without one."""
    from shared.kernels.triton.pages import copy_pages

    device, layers, num_pages = tensors.place.device, 2 if tensors.place.is_dry else 32, tensors.size(4096)
    page_nbytes = tensors.size(8 * PAGE_SIZE * HEAD_DIM * 2)
    pages = torch.randint(0, 255, (2 * layers, num_pages, page_nbytes), dtype=torch.uint8, device=device)
    ids = torch.randperm(num_pages, device=device)[:16]
    block = torch.cat([torch.zeros(2, dtype=torch.int64, device=device), ids])
    slot = torch.empty(2 * layers, 16, page_nbytes, dtype=torch.uint8, device=device)
    words = pages.view(torch.int64)
    return Pair(
        what="gather of 16 pages, with a digest",
        ours=lambda i: copy_pages(pages, range(2 * layers), slot, block, scatter=False),
        theirs=lambda i: torch.index_select(words, 1, ids),
        nbytes=2 * slot.nbytes,
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
        theirs=lambda i: torch_silu_mul(gates[i % len(gates)]),
        nbytes=1.5 * gates[0].nbytes,
    )


def torch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product in two operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def product(tensors: Tensors, tokens: int) -> Pair:
    """The largest product of --exact against cuBLAS's."""
    from shared.kernels.triton.linear import ExactLinear

    place = tensors.place
    exact = ExactLinear(3) if place.is_dry else ExactLinear.of(torch.device(place.device))
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
