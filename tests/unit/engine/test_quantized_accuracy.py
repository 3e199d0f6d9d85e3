"""The native kernels lose no more to a format than transformers does with the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.model.files import resolve_model
from tests.quantized_accuracy import (
    ON_LOAD,
    Distance,
    formats,
    held_out,
    logits_with_fp8,
    native_logits,
    their_logits,
)
from tests.quantized_models import quantize_folder

LOST = {
    ("W8A8", False): 0.0,
    ("W4A16 g32", False): 0.001,
    ("W4A16 g32", True): 0.0001,
    ("GPTQ g128", False): 0.001,
    ("AWQ g128", False): 0.001,
    ("W8A16 channel", False): 0.0005,
    ("W8A16 channel", True): 0.0001,
    ("FP8 channel", False): 0.0002,
    ("FP8 blocks", False): 0.0002,
}
"""Nats that may be lost beside: to activations of 8 bits where only weights are quantized there, and to bf16.

By format, and whether activations stay in 16 bits.
"""


pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    return held_out(resolve_model("builtin"), 1, 256)


@pytest.fixture(scope="module")
def exact(windows: list[list[int]]) -> torch.Tensor:
    return their_logits(resolve_model("builtin"), windows)


@pytest.mark.parametrize(("name", "weight_only"), LOST)
def test_a_format_is_as_accurate_as_in_transformers(
    tmp_path: Path, windows: list[list[int]], exact: torch.Tensor, name: str, weight_only: bool
) -> None:
    folder = quantize_folder(resolve_model("builtin"), tmp_path / "model", formats(128)[name]())
    ours = Distance.of(native_logits(folder, windows, weight_only=weight_only), exact, windows)
    theirs = Distance.of(
        their_logits(folder if name == "W8A8" else folder / "dense", windows), exact, windows
    )
    assert 0 < ours.kl < 1.1 * theirs.kl + LOST[name, weight_only]


def test_products_of_fp8_lose_little_beside_its_weights(
    tmp_path: Path, windows: list[list[int]], exact: torch.Tensor
) -> None:
    folder = quantize_folder(resolve_model("builtin"), tmp_path / "model", formats(128)["FP8 blocks"]())
    of_weights = Distance.of(their_logits(folder / "dense", windows), exact, windows)
    of_both = Distance.of(logits_with_fp8(folder, windows), exact, windows)
    assert of_weights.kl < of_both.kl < 2.5 * of_weights.kl


@pytest.mark.parametrize(("flag", "most"), [("int8", 0.001), ("int4", 0.033)])
def test_what_is_made_while_loading_is_near_the_model(
    windows: list[list[int]], exact: torch.Tensor, flag: str, most: float
) -> None:
    assert flag in ON_LOAD.values()
    assert Distance.of(native_logits(resolve_model("builtin"), windows, flag), exact, windows).kl < most


def test_a_kv_cache_of_int8_is_near_one_of_bf16(windows: list[list[int]], exact: torch.Tensor) -> None:
    builtin = resolve_model("builtin")
    assert Distance.of(native_logits(builtin, windows, kv_dtype=torch.int8), exact, windows).kl < 0.0005
