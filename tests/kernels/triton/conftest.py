"""Tests of Triton's kernels, in Triton's interpreter (tests/conftest.py), or on a GPU by `make test-gpu`.

The interpreter's products and argmax of bfloat16 are silently wrong: tests there use float32 and float16, and kernels
work in any type. On a GPU they use bfloat16 as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.device import device
from tests.pretend_gpu import GPU, HOST, PretendGenerator, PretendGpu, is_on_gpu


@pytest.fixture(scope="module", autouse=True)
def products_in_order() -> Iterator[None]:
    """The interpreter's products add up over K in its order, as a matrix instruction does in any row and any tile.

    numpy's BLAS has another order for other shapes and other rows, on some CPUs.
    """

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        product: np.ndarray = np.einsum(
            "mk,kn->mn", np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype)
        )
        return product

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", matmul)
        yield


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tensors that a test makes are on the device. A generator has to be told: `torch.Generator(device())`."""
    with device() if device().type == "cuda" else pretended(GPU):
        yield


@pytest.fixture(scope="module")
def beside_device() -> Iterator[None]:
    """Tensors that a test makes are on the host unless it says `device()`."""
    with nullcontext() if device().type == "cuda" else pretended(HOST):
        yield


@contextmanager
def pretended(default: torch.device) -> Iterator[None]:
    """A GPU on a CPU, which refuses what a real one does. A kernel has pointers to its memory, and to what is pinned.

    No memory is pinned here, so it is the name of the kernel's argument that says so.
    """
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def launch_on_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, one in zip(self.arg_names, args, strict=False):
            readable = not isinstance(one, torch.Tensor) or is_on_gpu(one) or name.startswith("pinned_")
            assert readable, f"{name} is a pointer to the host"
        launch(self, *args, **kwargs)

    with PretendGpu(default), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", PretendGenerator)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_on_gpu)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Kernels are imported at the head of each test module."""
    if importlib.util.find_spec("triton") is None:
        return _WithoutTriton.from_parent(parent, path=module_path)
    return None


class _WithoutTriton(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("NO TRITON: it is not installed", allow_module_level=True)
