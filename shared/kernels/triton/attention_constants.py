"""What `attention_kernel` and `merge_kernel` are compiled with, by shape of heads, type, GPU, and `exact`.

With `exact` a token has one order of sums, so decode steps have the tiles of a prefill, and splits begin at multiples
of SPLIT. Without, cuBLAS's products break that anyway: a tile of few rows is a smaller one, which leaves the memory
more room, and the host cuts tiles where it likes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from shared.kernels.triton.attention_work import MERGE_ROWS, SPLIT

MERGE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
WARPS_A_PROCESSOR = 8
"""As many of `attention_kernel` run at once on a multiprocessor (`make test-cubins`)."""
FEW_ROWS = 16
"""The fewest rows of a matrix instruction: one decoded token of up to 16 query heads a KV head."""


def attention_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    exact: bool,
    has_codes: bool = False,
) -> dict[str, int]:
    """Return the constexprs of `attention_kernel`. They decide about bits."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "PAGE_SIZE": page_size,
        "BLOCK_M": 64 if block_d * dtype.itemsize <= 256 else 32,
        "FEW_M": FEW_ROWS
        if not exact and dtype.itemsize == 2 and block_d <= 128
        else 0,  # else it would spill
        "TILE": max(16, min(32 if has_codes else 64, 16384 // (block_d * dtype.itemsize))),
        "SPLIT": SPLIT if exact else 0,
        "HAS_CODES": has_codes,
    }


def merge_constants(attention: dict[str, int]) -> dict[str, int]:
    """Return the constexprs of `merge_kernel`."""
    shared = {name: attention[name] for name in ("NUM_KV_HEADS", "GROUP", "HEAD_DIM", "BLOCK_D")}
    return {**shared, "MERGE_ROWS": MERGE_ROWS}


def attention_options(capability: int, constants: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the launch options of `attention_kernel` on a GPU of compute capability 80, 90, ..

    Four warps leave room for two programs on a multiprocessor, where their registers suffice (`make test-cubins`).
    With 3 stages the keys and values of two tiles are on their way while one is computed. Shared memory of sm_80 has
    room for two programs with 2 stages, that of sm_120 for one.
    """
    fits = capability <= 90 and constants["HEAD_DIM"] == constants["BLOCK_D"] and dtype.itemsize == 2
    if constants["HAS_CODES"]:  # which need registers as numbers too
        fits = capability == 100 and constants["HEAD_DIM"] <= 128
    num_stages = 3 if dtype.itemsize == 2 and capability in (90, 100) else 2
    return {"num_warps": 4 if fits else 8, "num_stages": num_stages, "enable_fp_fusion": False}


def processors(device: torch.device) -> tuple[int, int]:
    """Multiprocessors and compute capability; those of a small GPU for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return 4, 90
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, 10 * properties.major + properties.minor
