"""Embedding, RMSNorm, QK-norm with RoPE and the KV write, against float64.

All arithmetic is float32 (u = 2^-24) with one rounding to bf16 (2^-8) at the end. A mean of D squares is off by D u
at most, its inverse root by half of that, and a handful of roundings follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shared.kernels.cpu.library import Team
from shared.kernels.row_codes import quantize_rows, split_codes
from shared.model.rope import Rope
from shared.model.rotary import rotary_waves
from tests.kernels.cpu.norm_rope import (
    KVPlaces,
    add_rms_norm,
    embed,
    norm_rope_write,
    rms_norm,
    rotary_cos_sin,
)
from tests.kernels.cpu.test_linear import BF16, U, assert_within

EPS = 1e-6


@pytest.mark.parametrize("scale", [1.0, 33.75])
def test_embed(team: Team, scale: float) -> None:
    table_VD = torch.randn(11, 52).bfloat16()
    input_ids_T = torch.tensor([3, 0, 10, 3, 7, 7, 1])
    assert torch.equal(embed(team, input_ids_T, table_VD, scale), scale * table_VD[input_ids_T].float())


@pytest.mark.parametrize(("T", "D"), [(1, 16), (3, 130), (9, 768), (0, 32)], ids=lambda x: str(x))
def test_rms_norm(team: Team, T: int, D: int) -> None:
    x_TD = torch.randn(T, D) * torch.logspace(-3, 3, T)[:, None]
    weight_D = torch.randn(D)
    wide_TD = x_TD.double()
    expected = weight_D * wide_TD / (wide_TD.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    assert_within(rms_norm(team, x_TD, weight_D, EPS), expected, (BF16 + (D / 2 + 8) * U) * expected.abs())
    residual_TD = torch.randn(T, D)
    sum_TD = residual_TD + expected
    add_rms_norm(team, x_TD, weight_D, EPS, residual_TD)
    assert_within(residual_TD, sum_TD, (D / 2 + 8) * U * expected.abs() + U * sum_TD.abs())


@pytest.mark.parametrize("half", [8, 16, 24, 64])
def test_rotary_cos_sin(team: Team, half: int) -> None:
    """The angle is the float32 product, as in transformers; what is made of it is good to some units of float32."""
    positions_T = torch.tensor([0, 1, 2, 77, 4095, 131_071, 1_000_003])
    frequencies_R = 1.0 / 10_000.0 ** (torch.arange(half) / half)
    amplitudes_R = torch.linspace(0.5, 1.5, half)
    angles_TR = (positions_T.float()[:, None] * frequencies_R).double()
    cos_sin_T2R = rotary_cos_sin(team, positions_T, torch.stack([frequencies_R, amplitudes_R]))
    expected = torch.stack([angles_TR.cos(), angles_TR.sin()], 1) * amplitudes_R
    assert_within(cos_sin_T2R, expected, (5 * U * amplitudes_R).expand_as(expected))


@dataclass(frozen=True)
class Heads:
    T: int
    H: int
    K: int
    D: int
    page_size: int
    qk_norm: bool

    def __str__(self) -> str:
        return f"T{self.T}-H{self.H}-K{self.K}-D{self.D}-page{self.page_size}" + "-norm" * self.qk_norm


@pytest.mark.parametrize(
    "heads",
    [
        Heads(1, 1, 1, 16, 16, False),
        Heads(5, 4, 2, 16, 1, True),
        Heads(7, 3, 1, 48, 16, True),
        Heads(9, 12, 12, 64, 4, False),
        Heads(13, 4, 2, 128, 48, True),
        Heads(2, 2, 1, 256, 16, True),
    ],
    ids=str,
)
def test_norm_rope_write(team: Team, heads: Heads) -> None:
    T, H, K, D, S = heads.T, heads.H, heads.K, heads.D, heads.page_size
    qkv_TND = torch.randn(T, H + 2 * K, D).bfloat16()
    norm_ND = torch.randn(H + K, D) if heads.qk_norm else None
    cos_sin_T2R = rotary_cos_sin(
        team, torch.arange(T) * 13, rotary_waves(Rope(theta=10_000.0, rotary_dim=D), D, torch.device("cpu"))
    )
    num_pages = T + 2
    k_pages, v_pages = (torch.full((num_pages, K, S, D), 50.0, dtype=torch.bfloat16) for _ in range(2))
    slots_T = torch.randperm(num_pages * S)[:T]
    kv = KVPlaces(k_pages, v_pages, slots_T // S, slots_T % S)

    q_THD = norm_rope_write(team, qkv_TND, norm_ND, EPS, cos_sin_T2R, kv)

    qk_TND, v_TKD = qkv_TND.split([H + K, K], 1)
    x = qk_TND.double()
    if norm_ND is not None:
        x = norm_ND * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    first, second = x.chunk(2, -1)
    cos, sin = cos_sin_T2R.double()[:, None].unbind(2)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    magnitudes = torch.cat([(first * cos).abs() + (second * sin).abs()] * 2, -1).maximum(
        torch.cat([(second * cos).abs() + (first * sin).abs()] * 2, -1)
    )
    bound = BF16 * expected.abs() + (D / 2 + 8) * U * magnitudes
    assert_within(q_THD, expected[:, :H], bound[:, :H])
    assert_within(k_pages[kv.pages_T, :, kv.offsets_T], expected[:, H:], bound[:, H:])
    assert torch.equal(v_pages[kv.pages_T, :, kv.offsets_T], v_TKD)
    coded = [torch.full((num_pages, K, S, D + 4), 50, dtype=torch.int8) for _ in range(2)]
    places = KVPlaces(*coded, kv.pages_T, kv.offsets_T)
    assert torch.equal(norm_rope_write(team, qkv_TND, norm_ND, EPS, cos_sin_T2R, places), q_THD)
    for pages, of_codes in zip((k_pages, v_pages), coded, strict=True):
        codes, scales = split_codes(of_codes)
        expected_codes, expected_scales = quantize_rows(pages[kv.pages_T, :, kv.offsets_T])
        assert torch.equal(codes[kv.pages_T, :, kv.offsets_T], expected_codes)
        assert torch.equal(scales[kv.pages_T, :, kv.offsets_T], expected_scales)
        codes[kv.pages_T, :, kv.offsets_T] = 50  # nothing else is touched
        scales.view(torch.int32)[kv.pages_T, :, kv.offsets_T] = 50 * 0x01010101
        assert (of_codes == 50).all()
        pages[kv.pages_T, :, kv.offsets_T] = 50.0
        assert (pages == 50.0).all()
