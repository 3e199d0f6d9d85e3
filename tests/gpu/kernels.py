"""How fast is each kernel beside torch's own operations, and against what the GPU can do?

Every figure is how many times as fast the kernel is. Shapes are those of an 8B; inputs rotate among buffers that are
larger than the L2 cache together, and launches are no part of the times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from tests.gpu.limits import measured
from tests.gpu.rows import figure
from tests.gpu.steps import Place, Report
from tests.gpu.timing import seconds_of

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14_336, 32, 8, 128, 128_256
DRY = 32
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


def pairs(tensors: Tensors) -> Iterator[Pair]:
    """Those of one decode step and of a chunk of a prompt. Each is made when the one before it is done."""
    for tokens in (64, tensors.size(8192)):
        yield norm(tensors, tokens)
        yield silu(tensors, tokens)
    for tokens in (1, 64, tensors.size(256), tensors.size(2048)):
        yield product(tensors, tokens)
    for rows in (1, tensors.size(256)):
        yield sampling(tensors, rows)


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
    from shared.kernels.triton.linear import MEDIUM, ExactLinear

    place = tensors.place
    exact = ExactLinear(3, MEDIUM) if place.is_dry else ExactLinear.of(torch.device(place.device))
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
    from shared.kernels.triton.sampling import SamplingTensors, sample

    logits = tensors.sets(rows, tensors.size(VOCAB), dtype=torch.float32)
    device = tensors.place.device
    params = SamplingTensors(
        temperatures_S=torch.full((rows,), 0.8, device=device),
        top_ks_S=torch.full((rows,), 50, device=device),
        top_ps_S=torch.full((rows,), 0.9, device=device),
        min_ps_S=torch.zeros(rows, device=device),
        uniforms_S=torch.rand(rows, dtype=torch.float64, device=device),
        needs_filter=True,
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
