"""Products with quantized weights equal their definition in torch, for any number of rows and any tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.engine.cuda.triton_ops import multiply_quantized
from shared.kernels.row_codes import quantize_rows
from shared.kernels.triton import quantized_linear as module
from shared.kernels.triton.quantized_linear import (
    FEW,
    FLOAT_FEW,
    FLOAT_MANY,
    MANY,
    Tile,
    quantized_linear,
    same_bits,
)
from shared.kernels.triton.row_codes import row_codes
from shared.model.linear import QuantizedLinear, in_groups
from tests.device import device

pytestmark = pytest.mark.usefixtures("on_device")


def layer(n: int, k: int, bits: int, group: int, *, extras: bool) -> QuantizedLinear:
    """A layer on the device; `extras` are zeros, an order and a bias."""
    generator = torch.Generator(device()).manual_seed(n)
    made = QuantizedLinear(
        codes_NK=torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8),
        bits=bits,
        scales_NG=torch.rand(n, k // group, generator=generator) / k,
        zeros_NG=torch.randint(0, 1 << bits, (n, k // group), generator=generator, dtype=torch.uint8)
        if extras
        else None,
        order_K=torch.randperm(k, generator=generator) if extras else None,
        bias_N=torch.randn(n, generator=generator) if extras else None,
    )
    return made.packed()


@pytest.mark.parametrize("tile", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "zeros-order-bias"])
@pytest.mark.parametrize(("bits", "group"), [(8, 192), (8, 32), (4, 32), (4, 96), (4, 192)])
def test_the_product_is_that_of_the_definition(bits: int, group: int, extras: bool, tile: Tile) -> None:
    linear = layer(70, 192, bits, group, extras=extras)
    x = torch.randn(19, 192, generator=torch.Generator(device()).manual_seed(1))
    whole = multiply_quantized(x, linear, tile)
    torch.testing.assert_close(whole, linear.multiply(x), rtol=1e-6, atol=1e-6)
    for rows in (slice(0, 1), slice(18, 19), slice(3, 19)):
        assert torch.equal(multiply_quantized(x[rows], linear), whole[rows])
    assert torch.equal(multiply_quantized(x.T.contiguous().T, linear), whole)


@pytest.mark.parametrize("tile", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "zeros-order-bias"])
@pytest.mark.parametrize(("bits", "group"), [(8, 192), (4, 32), (4, 192)])
def test_the_product_of_weights_alone(bits: int, group: int, extras: bool, tile: Tile) -> None:
    linear = replace(layer(70, 192, bits, group, extras=extras), is_weight_only=True)
    x = torch.randn(19, 192, generator=torch.Generator(device()).manual_seed(1))
    whole = multiply_quantized(x, linear, tile)
    torch.testing.assert_close(whole, linear.multiply(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(multiply_quantized(x.T.contiguous().T, linear, tile), whole)
    rounded = multiply_quantized(x.half(), linear, tile)
    torch.testing.assert_close(rounded, linear.multiply(x.half()), rtol=2**-9, atol=1e-3)


def fp8_layer(k: int, group: int, *, has_bias: bool = False) -> QuantizedLinear:
    """All numbers of the type but NaN, subnormal ones too."""
    made = layer(70, k, 8, group, extras=False)
    codes = torch.where(made.codes_NK & 127 == 127, 0, made.codes_NK)
    bias_N = torch.randn(70, generator=torch.Generator(device()).manual_seed(3)) if has_bias else None
    return replace(made, codes_NK=codes, is_float=True, bias_N=bias_N)


@pytest.mark.parametrize("group", [32, 192])
def test_the_product_of_fp8(group: int) -> None:
    linear = replace(fp8_layer(192, group), is_weight_only=True)
    x = torch.randn(19, 192, generator=torch.Generator(device()).manual_seed(1))
    expected = x @ linear.dequantized().T
    torch.testing.assert_close(multiply_quantized(x, linear), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(linear.multiply(x), expected)


@pytest.mark.parametrize("tile", [FLOAT_FEW, FLOAT_MANY], ids=["few", "many"])
@pytest.mark.parametrize(("k", "group"), [(192, 192), (256, 128), (96, 32)])
def test_the_product_of_fp8_by_fp8(k: int, group: int, tile: Tile) -> None:
    """Codes of x as well: what they lose is all that parts the product from that of weights alone."""
    linear = fp8_layer(k, group, has_bias=group == 128)
    x = torch.randn(140, k, generator=torch.Generator(device()).manual_seed(1)) * 3
    whole = multiply_quantized(x, linear, tile)
    torch.testing.assert_close(whole, linear.multiply(x), rtol=1e-5, atol=1e-4 * whole.std().item())
    lost = (whole - replace(linear, is_weight_only=True).multiply(x)).std() / whole.std()
    assert 0.005 < lost < 0.04
    for rows in (slice(0, 1), slice(139, 140), slice(3, 90)):
        assert torch.equal(multiply_quantized(x[rows], linear), whole[rows])


def test_products_of_fp8_are_no_integers() -> None:
    """The smallest number of the type, 2^-9, by the largest, 448."""
    smallest = torch.full_like(fp8_layer(96, 96).codes_NK, 1)
    linear = replace(fp8_layer(96, 96), codes_NK=smallest, scales_NG=torch.ones(70, 1))
    x = torch.zeros(2, 96)
    x[1, 5] = 3.0
    for product in (linear.multiply(x), multiply_quantized(x, linear)):
        assert torch.equal(product, x.sum(1, keepdim=True).expand(2, 70) / 512)


def test_a_tile_of_fp8_with_other_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x_MK: torch.Tensor, *of_layer: Any, tile: Tile, **how: Any) -> torch.Tensor:
        out_MN = quantized_linear(x_MK, *of_layer, tile=tile, **how)
        return out_MN * 1.01 if tile is FLOAT_MANY and x_MK.shape[1] == 96 else out_MN

    monkeypatch.setattr(module, "quantized_linear", broken)
    assert same_bits([64], torch.device(device()))
    assert same_bits([40], torch.device(device()))  # computed by torch
    assert not same_bits([40, 96], torch.device(device()))


@pytest.mark.parametrize("is_float", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "in another"])
def test_codes_of_rows_are_those_of_the_definition(has_order: bool, is_float: bool) -> None:
    linear = layer(8, 96, 8, 32, extras=True)
    linear = linear if has_order else replace(linear, order_K=None)
    x = torch.randn(5, 96, generator=torch.Generator(device()).manual_seed(2))
    x[0], x[4], x[4, ::2] = x[0] * 1e-33, 62.5, 127.0  # small ones, and ties
    x[4, 1:9:2] = 127 / 448 * 2**-9 * torch.tensor([1.0, 1.5, 3.0, 5.0])  # below the normal numbers of FP8
    x[1], x[2, :4], x[3, 40] = 0.0, torch.tensor([1e38, -1e38, 1e-38, 0.0]), float("nan")
    codes_MK, scales_MG, sums_MG = row_codes(x, linear.order_K, 32, is_float=is_float)
    groups_MGK = in_groups(x if linear.order_K is None else x[:, linear.order_K], 32)
    expected_MGK, expected_MG = quantize_rows(groups_MGK, codes_MK.dtype)
    finite_MG = expected_MG.isfinite()
    assert torch.equal(codes_MK.view(5, 3, 32)[finite_MG].float(), expected_MGK[finite_MG].float())
    assert torch.equal(scales_MG[finite_MG], expected_MG[finite_MG])
    assert scales_MG[~finite_MG].isnan().all() and (~finite_MG).sum() == 1
    assert (sums_MG is None) == is_float
    if sums_MG is not None:
        expected = codes_MK.view(5, 3, 32).int().sum(2, dtype=torch.int32)
        assert torch.equal(sums_MG[finite_MG], expected[finite_MG])


def test_codes_of_four_bits_are_packed_and_unpacked() -> None:
    linear = replace(
        layer(6, 64, 4, 32, extras=False),
        codes_NK=torch.arange(6 * 64).view(6, 64).byte() & 15,
        is_packed=False,
    )
    packed = linear.packed()
    assert packed.shape == linear.shape and packed.group_size == 32
    assert packed.codes_NK.nbytes == 6 * 32 and torch.equal(packed.unpacked().codes_NK, linear.codes_NK)
    assert linear.to(torch.device("meta")).is_packed


@pytest.mark.parametrize("group", [33, 24])
def test_other_groups_are_multiplied_by_torch(group: int) -> None:
    linear, x = layer(6, 3 * group, 4, group, extras=True), torch.ones(2, 3 * group)
    assert linear.is_packed == (group == 24)
    assert torch.equal(multiply_quantized(x, linear), linear.unpacked().multiply(x))
