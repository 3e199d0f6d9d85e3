"""Every configuration of a kernel that `make test-cubins` compiles. `make test` compiles the first of each kernel."""

from __future__ import annotations

import torch

from shared.kernels.triton import attention, pages
from tests.kernels.triton.cubins import Configuration, pointers, same_everywhere

ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attention_configuration(
    num_heads: int, num_kv_heads: int, head_dim: int, element: str = "bf16", page_size: int = 16
) -> Configuration:
    """`attention_kernel` for one shape of heads."""
    dtype = ELEMENTS[element]
    constants = attention.attention_constants(num_heads, num_kv_heads, head_dim, page_size, dtype)
    num_threads = 32 * attention.attention_options(100, head_dim)["num_warps"]
    tile_nbytes = constants["TILE"] * constants["BLOCK_D"] * dtype.itemsize
    return Configuration(
        name=f"attention-H{num_heads}-K{num_kv_heads}-D{head_dim}-page{page_size}-{element}",
        kernel=attention.attention_kernel,
        types={
            **pointers(element, "q_ptr", "k_ptr", "v_ptr", "out_ptr"),
            **pointers("fp32", "workspace_ptr", "totals_ptr"),
            **pointers("i32", "words_ptr"),
            "q_stride": "i32",
            "workspace_rows": "i32",
            "scale": "fp32",
        },
        constants=constants,
        divisible=("q_stride",),
        options=lambda arch: attention.attention_options(arch, head_dim),
        has_products=element != "fp32",
        min_wide_loads=2 * tile_nbytes // 16 // num_threads,
    )


def merge_configuration(num_heads: int, num_kv_heads: int, head_dim: int) -> Configuration:
    """`merge_kernel` for one shape of heads, in bfloat16."""
    constants = attention.attention_constants(num_heads, num_kv_heads, head_dim, 16, torch.bfloat16)
    return Configuration(
        name=f"attention-merge-H{num_heads}-K{num_kv_heads}-D{head_dim}-bf16",
        kernel=attention.merge_kernel,
        types={
            **pointers("bf16", "out_ptr"),
            **pointers("fp32", "workspace_ptr", "totals_ptr"),
            **pointers("i32", "words_ptr"),
            "workspace_rows": "i32",
        },
        constants=attention.merge_constants(constants),
        options=same_everywhere(**attention.MERGE_OPTIONS),
    )


def pages_configuration(*, scatter: bool) -> Configuration:
    """`copy_pages_kernel`; pages of real models are multiples of 128 bytes, and so are ranges of heads."""
    sizes = ("row_words", "page_words", "first_word", "slice_words")
    return Configuration(
        name=f"pages-{'scatter' if scatter else 'gather'}",
        kernel=pages.copy_pages_kernel,
        types={
            **pointers("i64", "pages_ptr", "slot_ptr", "block_ptr"),
            **dict.fromkeys(("first_row", "num_ids", *sizes), "i32"),
        },
        constants={"SCATTER": scatter, "BLOCK_LINES": pages.BLOCK_LINES},
        divisible=sizes,
        options=same_everywhere(**pages.OPTIONS),
        min_wide_loads=2,
    )


CONFIGURATIONS = [
    attention_configuration(32, 8, 128),
    attention_configuration(12, 12, 64),
    attention_configuration(16, 1, 64),
    attention_configuration(9, 3, 64),
    attention_configuration(32, 32, 96),
    attention_configuration(40, 8, 128),
    attention_configuration(16, 8, 128, "fp16"),
    attention_configuration(16, 8, 128, page_size=1),
    attention_configuration(8, 4, 256),
    attention_configuration(16, 2, 256),
    attention_configuration(16, 8, 128, "fp32"),
    merge_configuration(32, 8, 128),
    merge_configuration(9, 3, 64),
    merge_configuration(32, 32, 96),
    merge_configuration(16, 2, 256),
    pages_configuration(scatter=False),
    pages_configuration(scatter=True),
]
