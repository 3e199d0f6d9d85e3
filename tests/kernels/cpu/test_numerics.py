"""The bits of the native kernels are those of their numerics, so that nodes of equal numerics may share KV pages."""

from __future__ import annotations

import ctypes

import torch
import xxhash

from shared.kernels.cpu.library import Team, numerics
from shared.model.linear import QuantizedLinear
from tests.kernels.cpu.attention import extend_attention
from tests.kernels.cpu.linear import PackedLinear, dense, linear_silu_mul

DIGESTS = {
    "1/amx": 0xD80805EBBF9ECB04,
    "1/avx512_bf16": 0xEB036F64580ACB16,
    "1/fma": 0x88C8081671C8748B,
}
"""Where a change of the kernels gives other bits, BATON_SUMS in `src/numerics.cpp` has to be raised."""


QUANTIZED_DIGEST = 0x4204D4553C23A669
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
    attended = extend_attention(team, 4 * q, k_pages, v_pages, table, [0], [num_tokens])
    rows = (
        values(2, 48, 64, 2, seed=4).transpose(1, 2).reshape(2, 2, 32, 96)
    )  # of panels: 32 of gate, 32 of up
    weights = dense(team, rows.transpose(0, 1).reshape(128, 96), is_gate_up=True)
    gated = linear_silu_mul(team, attended.view(-1, 96)[:100], weights)
    digest = xxhash.xxh3_64()
    for result in (attended, gated):
        digest.update(result.contiguous().view(torch.int16).numpy().tobytes())
    assert hex(digest.intdigest()) == hex(DIGESTS[numerics(library)])


def test_quantized_layers_have_the_same_bits_by_any_instructions(team: Team) -> None:
    digest = xxhash.xxh3_64()
    for bits, group in ((8, 320), (4, 32), (4, 320)):
        codes = (values(128, 320, seed=5).float() * (1 << bits - 1) + (1 << bits - 1)).to(torch.uint8)
        scales = values(128, 320 // group, seed=6).float()
        for zeros in (None, codes[:, : 320 // group]):
            layer = QuantizedLinear(codes_NK=codes, bits=bits, scales_NG=scales, zeros_NG=zeros)
            gated = linear_silu_mul(team, values(70, 320, seed=7), PackedLinear(team, layer, is_gate_up=True))
            digest.update(gated.view(torch.int16).numpy().tobytes())
    assert hex(digest.intdigest()) == hex(QUANTIZED_DIGEST)
