"""The bits of the native kernels are those of their numerics, so that nodes of equal numerics may share KV pages."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
import xxhash

from shared.kernels.cpu.build import NativeUnavailable, cpu_flags, is_intel
from shared.kernels.cpu.decoder import Sampling, sample
from shared.kernels.cpu.library import Team, load_library, numerics
from shared.model.linear import Linear, QuantizedLinear
from tests.kernels.cpu.attention import decode_attention, extend_attention
from tests.kernels.cpu.conftest import BUILDS
from tests.kernels.cpu.linear import PackedLinear, dense, linear_float, linear_gelu_mul, linear_silu_mul
from tests.kernels.cpu.norm_rope import KVPlaces, norm_rope_write, rms_norm, rotary_cos_sin
from tests.kernels.cpu.test_attention import as_codes
from tests.kernels.cpu.test_experts import Packed, Shape, experts_of, inputs_of

DIGESTS = {
    "1/amx": 0x52972C2843136DE,
    "1/avx512_bf16": 0x7899B90193C108D9,
    "1/fma": 0xD653C886ED4ABF89,
}
"""Where a change of the kernels gives other bits, BATON_SUMS in `src/numerics.cpp` has to be raised."""


QUANTIZED_DIGEST = 0xD866C6968AF41791
"""Integers are the same by any instructions, and all CPUs make the same floats of them."""


def values(*shape: int, seed: int) -> torch.Tensor:
    """Values in [-1, 1) that no library draws, since another version of it might draw others."""
    n = torch.Size(shape).numel()
    hashed = (torch.arange(n, dtype=torch.int64) + seed) * 2654435761 >> 7
    return ((hashed & 0xFFFF).float() / 32768 - 1).bfloat16().view(shape)


def test_the_bits_are_those_of_the_numerics(library: ctypes.CDLL, team: Team) -> None:
    num_tokens, page_size = 700, 16
    q, k, v = (values(num_tokens, heads, 48, seed=seed) for heads, seed in ((6, 1), (2, 2), (2, 3)))
    table = torch.arange(-(-num_tokens // page_size), dtype=torch.int32)[None]
    pages = [torch.zeros(table.numel() * page_size, 2, 48, dtype=torch.bfloat16) for _ in range(2)]
    for to, new in zip(pages, (k, v), strict=True):
        to[:num_tokens] = new
    k_pages, v_pages = (x.view(-1, page_size, 2, 48).transpose(1, 2).contiguous() for x in pages)
    attended, of_codes = (
        extend_attention(team, 4 * q, k, v, table, [0], [num_tokens])
        for k, v in ((k_pages, v_pages), (as_codes(k_pages), as_codes(v_pages)))
    )
    # The second split takes nearly all of the first away, so that the last bits of float32 sums show in bf16. A token
    # without values gives it another reference.
    twice_k, twice_v = (torch.cat([x[:32], sign * x[:32]]) for x, sign in ((k_pages, 1), (v_pages, -1)))
    twice_k[32, :, 8] *= 4
    twice_v[[0, 32], :, 8] = 0
    last_q, twice_table = 4 * values(50, 6, 48, seed=8), torch.arange(64, dtype=torch.int32).repeat(50, 1)
    cancelled = decode_attention(team, last_q, twice_k, twice_v, twice_table, [1024] * 50)
    rows = (
        values(2, 48, 64, 2, seed=4).transpose(1, 2).reshape(2, 2, 32, 96)
    )  # of panels: 32 of gate, 32 of up
    weights = dense(team, rows.transpose(0, 1).reshape(128, 96), is_gate_up=True)
    products = [f(team, attended.view(-1, 96)[:100], weights) for f in (linear_float, linear_silu_mul)]
    products += products_of_quantized(team, is_weight_only=True)
    assert hex(digest_of(attended, of_codes, cancelled, *products)) == hex(DIGESTS[numerics(library)])


def test_quantized_layers_have_the_same_bits_by_any_instructions(team: Team) -> None:
    digest = digest_of(*products_of_quantized(team, is_weight_only=False))
    assert hex(digest) == hex(QUANTIZED_DIGEST)


def products_of_quantized(team: Team, *, is_weight_only: bool) -> Iterator[torch.Tensor]:
    for bits, group in ((8, 320), (4, 32), (4, 320)):
        codes = (values(128, 320, seed=5).float() * (1 << bits - 1) + (1 << bits - 1)).to(torch.uint8)
        scales = values(128, 320 // group, seed=6).float()
        for zeros in (None, codes[:, : 320 // group]):
            layer = QuantizedLinear(
                codes_NK=codes, bits=bits, scales_NG=scales, zeros_NG=zeros, is_weight_only=is_weight_only
            )
            yield linear_float(team, values(70, 320, seed=7), PackedLinear(team, layer))


def digest_of(*results: torch.Tensor) -> int:
    digest = xxhash.xxh3_64()
    for result in results:
        digest.update(result.contiguous().view(torch.int16).numpy().tobytes())
    return digest.intdigest()


def results(team: Team) -> Iterator[tuple[str, torch.Tensor]]:
    """What every kernel makes of the same inputs, of sizes that leave parts of vectors empty."""
    torch.manual_seed(0)
    size, num_tokens, heads, kv_heads, dim = 328, 900, 8, 2, 80
    x_TD = torch.randn(70, size) * torch.logspace(-30, 8, 70)[:, None]
    yield "rms_norm", rms_norm(team, x_TD, torch.randn(size), 1e-5)
    positions_T = torch.randint(0, 1 << 20, (num_tokens,))
    waves_2R = torch.stack([torch.logspace(0, -5, dim // 2), torch.rand(dim // 2)])
    cos_sin = rotary_cos_sin(team, positions_T, waves_2R)
    yield "rotary_cos_sin", cos_sin
    qkv_TND = 4 * torch.randn(num_tokens, heads + 2 * kv_heads, dim).bfloat16()
    norm_ND = torch.rand(heads + kv_heads, dim)
    table = torch.randperm(60).int()[None]
    places_T = table[0, torch.arange(num_tokens) // 16].long(), torch.arange(num_tokens) % 16
    for dtype, nbytes in ((torch.bfloat16, 0), (torch.int8, 4)):
        k, v = (torch.zeros(60, kv_heads, 16, dim + nbytes, dtype=dtype) for _ in range(2))
        q = norm_rope_write(team, qkv_TND, norm_ND, 1e-6, cos_sin, KVPlaces(k, v, *places_T))
        yield from ((f"{name} {dtype}", pages) for name, pages in zip("qkv", (q, k, v), strict=True))
        yield f"decode {dtype}", decode_attention(team, q[-1:].contiguous(), k, v, table, [num_tokens])
        yield f"extend {dtype}", extend_attention(team, q, k, v, table, [0], [num_tokens])
    rows = torch.randn(13, size).bfloat16() * torch.logspace(-3, 3, 13).bfloat16()[:, None]
    codes = torch.randint(0, 256, (130, size), dtype=torch.uint8)
    layers: list[Linear] = []
    for bits, group in ((8, size), (4, 8)):
        scales = torch.rand(130, size // group)
        zeros = codes[:, : size // group] >> (8 - bits)
        layers += [
            QuantizedLinear(
                codes_NK=codes >> (8 - bits), bits=bits, scales_NG=scales, zeros_NG=zeros, is_weight_only=only
            )
            for only in (False, True)
        ]
    packed = [PackedLinear(team, layer) for layer in layers]
    packed.append(dense(team, torch.randn(130, size).bfloat16(), torch.randn(130)))
    for m in (1, 2, 3, 4, 5, 13):
        yield from ((f"layer {i} m{m}", linear_float(team, rows[:m], w)) for i, w in enumerate(packed))
    fp4 = [Shape(96, 64, 21, 3, 4, 32, only, fp4=True, clamped=True) for only in (False, True)]
    for shape in (Shape(96, 48, 21, 3), Shape(96, 48, 21, 3, bits=4, group=48, normalized=False), *fp4):
        x_MD, scores_ME, residual_MD = inputs_of(shape, 9)
        experts = Packed(team, experts_of(shape))
        yield f"experts {shape}", experts.add(team, x_MD, scores_ME, residual_MD)
    gate_up = dense(team, torch.randn(130, size).bfloat16(), is_gate_up=True)
    yield "silu_mul", linear_silu_mul(team, rows, gate_up)
    yield "gelu_mul", linear_gelu_mul(team, rows, gate_up)
    logits = 6 * torch.randn(8, 3001)
    arrays = (
        np.full(8, 0.7, np.float32),
        np.full(8, 400),
        np.full(8, 0.9, np.float32),
        np.zeros(8, np.float32),
    )
    draws = Sampling.of(*arrays, np.linspace(0, 0.99, 8))
    yield "sample", sample(team, logits, draws, torch.arange(8), torch.zeros(8, dtype=torch.int64))
    yield "probabilities", logits


@pytest.mark.skipif(not is_intel() or "amx_bf16" in cpu_flags(), reason="this CPU multiplies bf16 fast")
def test_bf16_is_not_multiplied_where_float32_is_faster() -> None:
    assert numerics(load_library()) == "1/fma"


def test_builds_with_one_name_give_the_same_bits() -> None:
    builds: defaultdict[str, list[str]] = defaultdict(list)
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for build, flags in BUILDS.items():
        try:
            library = load_library(*flags)
        except NativeUnavailable as e:
            pytest.skip(f"NO NATIVE KERNELS: {e}")
        builds[numerics(library)].append(build)
        team = Team(library, [0])
        seen[build] = dict(results(team))
        team.close()
    assert {"plain-avx512", "avx2", "plain-avx2"} <= set(builds["1/fma"])
    for alike in builds.values():
        for one, other in pairwise(alike):
            parted = [name for name, x in seen[one].items() if not same_bits(x, seen[other][name])]
            assert not parted, (one, other)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
