"""The products of `--exact`: right, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from shared.kernels.triton.linear import MEDIUM, NARROW, WIDE, ExactLinear, Tile, linear
from tests.device import device

pytestmark = pytest.mark.usefixtures("on_device")

TILES = {"narrow": NARROW, "medium": MEDIUM, "wide": WIDE}
SHAPES = [(1, 1, 1), (3, 70, 40), (65, 33, 64), (129, 300, 200), (64, 256, 128)]


TOLERANCE = {torch.float32: 1e-4}
if device().type == "cuda":  # float32 needs more shared memory than a wide tile has
    TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def operands(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device()).manual_seed(M)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((M, K), (N, K), (N,)))
    return x, weight, bias


@dtypes
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_linear(M: int, N: int, K: int, has_bias: bool, tile: Tile, dtype: torch.dtype) -> None:
    x, weight, bias = operands(M, N, K, dtype)
    expected = torch_linear(x.float(), weight.float(), bias.float() if has_bias else None)
    for num_programs in (1, 3, 1000):
        out = linear(x, weight, bias if has_bias else None, tile, num_programs)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("wide", [MEDIUM, WIDE], ids=["medium", "wide"])
def test_a_row_has_the_same_bits_among_any_number_of_others(wide: Tile, dtype: torch.dtype) -> None:
    x, weight, bias = operands(200, 70, 136, dtype)
    product = ExactLinear(num_programs=3, wide=wide)
    together = product(x, weight, bias)
    for first, num in ((0, 1), (199, 1), (70, 63), (70, 64), (70, 65), (7, 150)):
        rows = slice(first, first + num)
        assert torch.equal(product(x[rows], weight, bias), together[rows]), (first, num)


@dtypes
def test_the_tiles_are_compared_on_the_device_itself(dtype: torch.dtype) -> None:
    assert ExactLinear(num_programs=7, wide=MEDIUM).same_bits(dtype, device())
