"""Which Triton kernels compute a model on a GPU. Imported on a GPU alone."""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch.nn.functional import linear

from shared.engine.torch_backend import Kernels
from shared.engine.triton_attention import TritonAttention
from shared.engine.triton_ops import Linear, TritonOps, TritonTokens
from shared.errors import ConfigError
from shared.kernels.triton.attention import PagedAttention
from shared.kernels.triton.linear import ExactLinear
from shared.kvcache.pools import TokenToKVPool
from shared.model.config import ModelConfig

SUMS = 1
"""Raised by every change of a kernel that gives other bits for the same inputs."""


def triton_kernels(config: ModelConfig, exact: bool, pool: TokenToKVPool) -> Kernels:
    """Those for a pool on a GPU. Raises ConfigError where the GPU's products cannot be exact.

    Their numerics name SUMS, Triton's version, the GPU, and the products: exact, or cuBLAS's of a version of torch.
    """
    gpu = torch.cuda.get_device_name(pool.device)
    numerics = f"triton-{SUMS}-{triton.__version__}/{gpu}"
    if not exact:
        return make_triton_kernels(config, pool, linear, f"{numerics}/cublas-{torch.__version__}")
    product = ExactLinear.of(pool.device)
    if not product.same_bits(pool.dtype, pool.device):
        raise ConfigError(f"--exact: on {gpu} products of few rows have other bits than those of many")
    return make_triton_kernels(config, pool, product, f"{numerics}/exact", is_exact=True)


def make_triton_kernels(
    config: ModelConfig, pool: TokenToKVPool, product: Linear, numerics: str, *, is_exact: bool = False
) -> Kernels:
    """Those for a pool on any device that Triton computes for, an interpreted CPU included."""
    attention = PagedAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=pool.page_size,
        dtype=pool.dtype,
        device=pool.device,
    )
    return Kernels(
        name="triton",
        numerics=numerics,
        is_exact=is_exact,
        attention=TritonAttention(attention),
        make_ops=partial(TritonOps, product=product),
        tokens=TritonTokens(),
    )
