"""Which Triton kernels compute a model on a GPU. Imported on a GPU alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch.nn.functional import linear

from shared.engine.cuda.triton_attention import TritonAttention
from shared.engine.cuda.triton_ops import ExpertStacks, Product, TritonOps, TritonTokens
from shared.engine.torch_backend import Kernels
from shared.errors import ConfigError
from shared.kernels.row_codes import LARGEST
from shared.kernels.triton import quantized_linear
from shared.kernels.triton.attention import PagedAttention
from shared.kernels.triton.attention_constants import processors
from shared.kernels.triton.linear import ExactLinear
from shared.kvcache.windowed_pool import AnyKVPool
from shared.model.config import ModelConfig

SUMS = 3
"""Raised by every change of a kernel that gives other bits for the same inputs."""


def triton_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, exact: bool
) -> Callable[[AnyKVPool], Kernels]:
    """What makes those for a pool on a GPU. Raises ConfigError where the GPU's products cannot be exact.

    Their numerics name SUMS, Triton's version, the GPU, and `exact`, or `inexact` with torch's version for cuBLAS.
    Then a decode step has other bits than a prefill, and so may a stream that is continued.
    """
    numerics = f"triton-{SUMS}-{triton.__version__}/{torch.cuda.get_device_name(device)}"
    if not exact:
        numerics = f"{numerics}/inexact/cublas-{torch.__version__}"
        return partial(make_triton_kernels, config, dtype, product=linear, numerics=numerics)
    product = ExactLinear.of(device, dtype)
    require_exact(product, config, dtype, device)
    return partial(make_triton_kernels, config, dtype, product=product, numerics=f"{numerics}/exact")


def require_exact(
    product: ExactLinear, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ConfigError unless products of the model's shapes have the same bits by every tile."""
    if config.has_experts:
        raise ConfigError("--exact: experts are not computed exactly on a GPU")
    depths, quantization = sorted(config.widths), config.quantization
    schemes = () if quantization is None else quantization.schemes
    is_same = product.same_bits(depths, dtype, device)
    if any(scheme.has_float_products for _, scheme in schemes):
        is_same &= quantized_linear.same_bits(depths, device)
    if not is_same:
        raise ConfigError(f"--exact: on {device} products of few rows have other bits than those of many")


def make_triton_kernels(
    config: ModelConfig, dtype: torch.dtype, pool: AnyKVPool, product: Product, numerics: str
) -> Kernels:
    """Those for a pool on any device that Triton computes for, an interpreted CPU included."""
    is_exact = isinstance(product, ExactLinear)
    attention = PagedAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=pool.page_size,
        dtype=dtype,
        device=pool.device,
        exact=is_exact,
        has_codes=pool.dtype in LARGEST,
    )
    return Kernels(
        name="triton",
        numerics=numerics,
        is_exact=is_exact,
        attention=TritonAttention(attention),
        make_ops=partial(TritonOps, product=product, stacks=ExpertStacks(processors(pool.device)[0])),
        tokens=TritonTokens(),
    )
