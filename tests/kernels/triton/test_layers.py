"""The kernels between matmul and attention against the functions of `shared/model/layers.py`.

In float32, and in float16, where each rounding shows. The interpreter rounds to bfloat16 in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shared.kernels.reference import write_kv
from shared.kernels.row_codes import LARGEST, quantize_rows, split_codes
from shared.kernels.triton.norm import add_norm
from shared.kernels.triton.rope import norm_rope_write, rotary
from shared.kernels.triton.silu_mul import gelu_mul, silu_mul
from shared.model import layers
from shared.model.rope import Rope
from shared.model.rotary import rotary_waves
from tests.device import device

pytestmark = pytest.mark.usefixtures("on_device")

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
if device().type == "cuda":
    TOLERANCE[torch.bfloat16] = 1.6e-2
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def randn(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator(device()).manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for the order of a sum and another exponential: in float16 that is one step of the last bit."""
    tolerance = TOLERANCE[expected.dtype]
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


weight_dtypes = pytest.mark.parametrize("is_wide", [False, True], ids=["weight", "float32-weight"])
"""Norms whose weight has the type of x, and those of Gemma."""


@dtypes
@weight_dtypes
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (5, 100), (3, 1024), (2, 4097)])
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "first"])
def test_add_norm(num_tokens: int, size: int, has_residual: bool, is_wide: bool, dtype: torch.dtype) -> None:
    x = randn(num_tokens, size, dtype=dtype)
    weight = randn(size, dtype=torch.float32 if is_wide else dtype, seed=1)
    before = randn(num_tokens, size, dtype=dtype, seed=2) if has_residual else None
    expected_sum = x.clone() if before is None else before + x
    normed, total = add_norm(x, before, weight, EPS)
    assert torch.equal(total, expected_sum)
    assert total is (x if before is None else before)
    assert_close(normed, layers.rms_norm(expected_sum, weight, EPS))


@dtypes
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 70), (2, 1024), (1, 2500)])
def test_silu_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * randn(num_tokens, 2 * size, dtype=dtype)
    gate_up[0, 0] = -60.0
    assert_close(silu_mul(gate_up), layers.silu_mul(gate_up))
    assert_close(gelu_mul(gate_up), layers.gelu_mul(gate_up))


@dtypes
@pytest.mark.parametrize("num_pairs", [1, 12, 64])
def test_rotary(num_pairs: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 7, 4095, 131071])
    waves = rotary_waves(Rope(theta=10_000.0, rotary_dim=2 * num_pairs), 2 * num_pairs, positions.device)
    waves[1] = torch.linspace(0.5, 1.5, num_pairs)
    cos_T1D, sin_T1D = layers.rotary_cos_sin(positions, waves, dtype)
    cos_TR, sin_TR = rotary(positions, waves, dtype)
    assert_close(cos_TR, cos_T1D[:, 0, :num_pairs])
    assert_close(sin_TR, sin_T1D[:, 0, :num_pairs])


@dataclass(frozen=True)
class Shape:
    H: int
    K: int
    D: int
    page_size: int = 16

    def __str__(self) -> str:
        return f"H{self.H}-K{self.K}-D{self.D}-page{self.page_size}"


SHAPES = [
    Shape(1, 1, 2),
    Shape(4, 2, 32, page_size=1),
    Shape(9, 3, 24, page_size=3),
    Shape(5, 1, 96),
    Shape(16, 1, 64),
    Shape(2, 2, 256),
]


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", ["norm", "float32-norm", None])
def test_norm_rope_write(shape: Shape, norm: str | None, dtype: torch.dtype) -> None:
    """What no token goes to keeps its value."""
    H, K, D, S = shape.H, shape.K, shape.D, shape.page_size
    positions = torch.tensor([0, 3, 999])
    pages_T, offsets_T = torch.tensor([5, 2, 6]), torch.tensor([0, S - 1, S // 2])
    qkv = randn(3, H + 2 * K, D, dtype=dtype)
    weight_dtype = torch.float32 if norm == "float32-norm" else dtype
    weight = randn(H + K, D, dtype=weight_dtype, seed=1) if norm else None
    waves = rotary_waves(Rope(theta=10_000.0, rotary_dim=D), D, positions.device)
    k_pages, v_pages = (torch.full((7, K, S, D), fill, dtype=dtype) for fill in (3.0, 4.0))
    expected_k, expected_v = k_pages.clone(), v_pages.clone()

    cos_T1D, sin_T1D = layers.rotary_cos_sin(positions, waves, dtype)
    qk, v = qkv[:, : H + K], qkv[:, H + K :]
    qk = qk if weight is None else layers.rms_norm(qk, weight, EPS)
    expected_q, k = torch.split(layers.apply_rotary(qk, cos_T1D, sin_T1D), [H, K], dim=1)
    write_kv(expected_k, expected_v, k, v, pages_T, offsets_T)

    cos_TR, sin_TR = (x[:, 0, : D // 2].contiguous() for x in (cos_T1D, sin_T1D))
    q = norm_rope_write(qkv, K, weight, EPS, cos_TR, sin_TR, pages_T, offsets_T, k_pages, v_pages)
    assert_close(q, expected_q)
    assert_close(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)


@dtypes
@pytest.mark.parametrize("kind", LARGEST, ids=str)
def test_norm_rope_write_makes_codes(dtype: torch.dtype, kind: torch.dtype) -> None:
    """Of what it writes to pages of that type, as `quantize_rows` does."""
    H, K, D, S = 3, 2, 48, 4
    pages_T, offsets_T = torch.tensor([5, 2, 6, 6]), torch.tensor([0, S - 1, 1, 2])
    qkv = randn(4, H + 2 * K, D, dtype=dtype)
    qkv[1, H + K], qkv[2, H + K, 5] = 0.0, torch.nan
    qkv[0, H + K] = torch.logspace(
        -14, 0, D, base=2.0
    )  # codes of FP8 with fewer bits, and between two of them
    weight, angles = randn(H + K, D, dtype=dtype, seed=1), randn(4, D // 2, dtype=torch.float32, seed=2)
    of_token = weight, EPS, angles.cos().to(dtype), angles.sin().to(dtype), pages_T, offsets_T
    dense = [torch.zeros(7, K, S, D, dtype=dtype) for _ in range(2)]
    coded = [torch.full((7, K, S, D + 4), 3, dtype=torch.int8).view(kind) for _ in range(2)]
    q = norm_rope_write(qkv, K, *of_token, *dense)
    assert torch.equal(norm_rope_write(qkv, K, *of_token, *coded), q)
    for values, pages in zip(dense, coded, strict=True):
        codes, scales = split_codes(pages)
        codes = codes.view(torch.int8)
        expected_codes, expected_scales = quantize_rows(values[pages_T, :, offsets_T], kind)
        torch.testing.assert_close(
            scales[pages_T, :, offsets_T], expected_scales, rtol=0, atol=0, equal_nan=True
        )
        finite = expected_scales.isfinite()
        assert torch.equal(codes[pages_T, :, offsets_T][finite], expected_codes.view(torch.int8)[finite])
        is_untouched = torch.ones(7, S, dtype=torch.bool)
        is_untouched[pages_T, offsets_T] = False
        assert (codes.transpose(1, 2)[is_untouched] == 3).all()


@pytest.mark.parametrize("size", [8, 100, 1024])
def test_a_row_does_not_depend_on_the_others(size: int) -> None:
    x, weight = randn(7, size, dtype=torch.float32), randn(size, dtype=torch.float32, seed=1)
    together, _ = add_norm(x, None, weight, EPS)
    alone = [add_norm(x[i : i + 1], None, weight, EPS)[0] for i in range(7)]
    assert torch.equal(together, torch.cat(alone))
