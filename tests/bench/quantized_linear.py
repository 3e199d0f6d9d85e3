"""How fast is one linear layer with weights of 8 and 4 bits, against torch's own kernels for them?

On one core, by rows of x in bf16, with weights that no cache holds. What is compared computes the same but for
rounding: activations of 8 bits here are made for each row, and in oneDNN's `qlinear` with one scale for all, which
takes less time.

    int8            `qlinear_pointwise` of oneDNN
    int4            torch's `_weight_int4pack_mm_for_cpu`, which keeps activations in 16 bits
    int4 with 16    the same, against `--weight-only-quantization`
    speedup         torch's time / that of the native kernel
    bf16_speedup    the native kernel's time with bf16 weights / that with these
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from shared.kernels.cpu.library import Team, load_library
from shared.model.linear import QuantizedLinear, quantize_weight
from tests.bench.limits import uncached_nbytes
from tests.bench.machine import pinned, usable_cores
from tests.bench.rounds import in_turn
from tests.bench.stats import figure, ratios
from tests.bench.table import Row
from tests.kernels.cpu.linear import PackedLinear, dense, linear

N = K = 4096
GROUP = 128
ROWS = (1, 4, 8, 32, 256)
Call = Callable[[torch.Tensor], object]


def main() -> Iterator[dict[str, Any]]:
    """Each kind of weight, by rows."""
    core = usable_cores()[0]
    torch.set_num_threads(1)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    int8 = quantize_weight(weight, bits=8, group_size=K)
    int4 = quantize_weight(weight, bits=4, group_size=GROUP)
    copies = uncached_nbytes() // (N * K // 2) + 1
    with pinned([core]), closing(Team(load_library(), [core])) as team:

        def native(layer: QuantizedLinear) -> list[Call]:
            return [_native(team, PackedLinear(team, layer)) for _ in range(copies)]

        of_bf16 = [_native(team, dense(team, weight)) for _ in range(copies // 4 + 1)]
        of_onednn = [_onednn(int8) for _ in range(copies)]
        of_torch = [_int4pack(int4) for _ in range(copies)]
        kinds = {
            "int8": (native(int8), of_onednn),
            "int4": (native(int4), of_torch),
            "int4 with 16": (native(replace(int4, is_weight_only=True)), of_torch),
        }
        for kind, (ours, theirs) in kinds.items():
            for m in ROWS:
                x = torch.randn(m, K).bfloat16()
                measures = [_microseconds(x, calls) for calls in (ours, theirs, of_bf16)]
                ours_us, theirs_us, bf16_us = in_turn(measures, about_s=1.0)
                row: dict[str, Any] = {"bench": "quantized_linear", "weights": kind, "rows": m}
                row |= figure("us", ours_us) | figure("torch_us", theirs_us)
                row |= figure("speedup", ratios(theirs_us, ours_us))
                yield row | figure("bf16_speedup", ratios(bf16_us, ours_us))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The least speedup of each kind."""
    kinds = dict.fromkeys(row["weights"] for row in rows)
    return {kind: min(row["speedup"] for row in rows if row["weights"] == kind) for kind in kinds}


def _microseconds(x: torch.Tensor, calls: Sequence[Call]) -> Callable[[], float]:
    """The time of one of `calls`, each with another copy of the weight."""
    turns = itertools.cycle(calls)

    def measure() -> float:
        begun = time.perf_counter()
        for call in itertools.islice(turns, len(calls)):
            call(x)
        return (time.perf_counter() - begun) / len(calls) * 1e6

    return measure


def _native(team: Team, packed: PackedLinear) -> Call:
    return lambda x: linear(team, x, packed)


def _onednn(layer: QuantizedLinear) -> Call:
    codes = (layer.codes_NK.to(torch.int16) - 128).to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    scales, zeros = layer.scales_NG[:, 0].contiguous(), torch.zeros(N, dtype=torch.int32)
    middle = torch.tensor([128], dtype=torch.int32)

    def call(x: torch.Tensor) -> torch.Tensor:
        scale = (x.abs().amax().float() / 127).reshape(1)
        x_codes = torch.quantize_per_tensor(x.float(), scale, middle, torch.quint8).int_repr()
        of_x = x_codes, scale, middle, packed, scales, zeros, None
        return torch.ops.onednn.qlinear_pointwise(*of_x, 1.0, 0, torch.bfloat16, "none", [], "")

    return call


def _int4pack(layer: QuantizedLinear) -> Call:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(layer.codes_NK.int(), 1)
    scales_GN = layer.scales_NG.T
    scales_zeros = torch.stack([scales_GN, torch.zeros_like(scales_GN)], -1).bfloat16().contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales_zeros)
