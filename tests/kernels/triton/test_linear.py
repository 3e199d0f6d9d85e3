"""The products of `--exact`: right, and the same bits for any number of rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from shared.engine.cuda.triton_kernels import require_exact
from shared.errors import ConfigError
from shared.kernels.triton import linear as module
from shared.kernels.triton import quantized_linear
from shared.kernels.triton.linear import (
    FEW,
    FLOAT32,
    MEDIUM,
    NARROW,
    TILES,
    WIDE,
    ExactLinear,
    Tile,
    linear,
    tiles_for,
)
from shared.model.quantization import Layout, Quantization, Scheme
from tests.device import device
from tests.token_engine import token_model_config

pytestmark = pytest.mark.usefixtures("on_device")

SHAPES = [(1, 1, 1), (3, 70, 40), (65, 33, 64), (129, 300, 200), (64, 256, 128)]


TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3}
CAPABILITY = (9, 0)
if device().type == "cuda":
    TOLERANCE |= {torch.bfloat16: 1e-2}
    CAPABILITY = torch.cuda.get_device_capability(device())
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
tiles = pytest.mark.parametrize(
    ("tile", "dtype"),
    [
        pytest.param(tile, dtype, id=f"{tile.m}x{tile.n}-{dtype}")
        for dtype in TOLERANCE
        for tile in tiles_for(CAPABILITY, dtype)
    ],
)


def operands(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device()).manual_seed(M)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((M, K), (N, K), (N,)))
    return x, weight, bias


@tiles
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_linear(M: int, N: int, K: int, has_bias: bool, tile: Tile, dtype: torch.dtype) -> None:
    x, weight, bias = operands(M, N, K, dtype)
    expected = torch_linear(x.float(), weight.float(), bias.float() if has_bias else None)
    for num_programs in (1, 3, 1000):
        out = linear(x, weight, bias if has_bias else None, tile, num_programs)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@tiles
def test_a_row_has_the_same_bits_among_any_number_of_others(tile: Tile, dtype: torch.dtype) -> None:
    x, weight, bias = operands(200, 70, 136, dtype)
    exact, together = ExactLinear(3, tiles_for(CAPABILITY, dtype)), linear(x, weight, bias, tile, 3)
    for first, num in ((0, 1), (199, 1), (70, 63), (70, 64), (70, 65), (7, 150)):
        rows = slice(first, first + num)
        assert torch.equal(exact(x[rows], weight, bias), together[rows]), (first, num)


@pytest.mark.parametrize(
    ("M", "N", "tile"),
    [
        (1, 151936, FEW),
        (16, 4096, FEW),
        (17, 4096, NARROW),
        (64, 4096, NARROW),
        (64, 151936, NARROW),
        (128, 4096, NARROW),
        (256, 4096, MEDIUM),
        (128, 28672, WIDE),
        (2048, 4096, WIDE),
    ],
)
def test_no_tile_leaves_most_multiprocessors_idle(M: int, N: int, tile: Tile) -> None:
    """Of the 132 of an H100."""
    assert ExactLinear(132).tile_for(M, N) is tile


@pytest.mark.parametrize("M", [1, 64, 2048])
def test_float32_has_tiles_of_its_own(M: int) -> None:
    """WIDE and MEDIUM spill registers in float32, and the gates compile FLOAT32 alone for it."""
    assert ExactLinear(132, tiles_for((9, 0), torch.float32)).tile_for(M, 4096) is FLOAT32


DEPTHS = [40, 128]


@dtypes
def test_the_tiles_are_compared_on_the_device_itself(dtype: torch.dtype) -> None:
    assert ExactLinear(7, tiles_for(CAPABILITY, dtype)).same_bits([72], dtype, device())


def test_experts_are_not_exact() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": DEPTHS[1]}
    config = token_model_config(architectures=["OlmoeForCausalLM"], hidden_size=DEPTHS[0], **experts)
    with pytest.raises(ConfigError, match="experts"):
        require_exact(ExactLinear(7), config, torch.float32, device())


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.m}x{tile.n}")
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_tile_with_other_bits_is_refused(depth: int, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor, bias: None, used: Tile, num: int) -> torch.Tensor:
        out = torch_linear(x, weight)
        return out * 1.01 if used is tile and x.shape[1] == depth else out

    monkeypatch.setattr(module, "linear", broken)
    config = token_model_config(hidden_size=DEPTHS[0], intermediate_size=DEPTHS[1])
    with pytest.raises(ConfigError, match="few rows"):
        require_exact(ExactLinear(7), config, torch.float32, device())


@pytest.mark.parametrize("has_float_products", [True, False], ids=["fp8", "weights alone"])
def test_tiles_of_fp8_with_other_bits_are_refused(
    has_float_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def same_bits(depths: list[int], on: torch.device) -> bool:
        compared.extend(depths)
        return False

    monkeypatch.setattr(module, "linear", lambda x, weight, *_: torch_linear(x, weight))
    monkeypatch.setattr(quantized_linear, "same_bits", same_bits)
    scheme = Scheme(
        layout=Layout.FP8_BLOCKS,
        bits=8,
        group_size=None,
        is_symmetric=True,
        is_weight_only=not has_float_products,
    )
    others = replace(scheme, layout=Layout.INT_QUANTIZED, is_weight_only=False)
    schemes = ((("lm_head",), others), (("Linear",), scheme))
    config = replace(
        token_model_config(hidden_size=32, intermediate_size=64),
        quantization=Quantization(schemes=schemes).kept_float(),
    )
    with pytest.raises(ConfigError, match="few rows") if has_float_products else nullcontext():
        require_exact(ExactLinear(7), config, torch.float32, device())
    assert compared == ([8, 32, 64] if has_float_products else [])
