"""Every configuration of a kernel that `make test-cubins` compiles. `make test` compiles the first of each kernel."""

from __future__ import annotations

import math

import torch

from shared.engine.cuda.triton_ops import TritonTokens
from shared.kernels.row_codes import LEAST
from shared.kernels.triton import (
    adjust,
    attention,
    attention_constants,
    grouped,
    linear,
    norm,
    pages,
    quantized_linear,
    resolve,
    rope,
    row_codes,
    sampling,
    silu_mul,
)
from tests.kernels.triton.cubins import SHARED_NBYTES, Configuration, pointers, same_everywhere

ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NO_SINKS: tuple[dict[str, object], dict[str, object]] = ({"sinks_ptr": None}, {})
CODES = {"int8": "i8", "fp8": "fp8e4nv"}
"""Triton's names for the types of KV codes."""


def archs_with(codes: str) -> list[int]:
    """Those that have this type of codes: FP8 comes with 8.9."""
    return [arch for arch in SHARED_NBYTES if arch > 80 or codes != "fp8"]


def attention_configuration(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element: str = "bf16",
    page_size: int = 16,
    *,
    exact: bool = False,
    codes: str = "",
    window: int = 0,
    has_sinks: bool = False,
) -> Configuration:
    """`attention_kernel` for one shape of heads, over pages of q's type or of codes."""
    dtype = ELEMENTS[element]
    constants = attention_constants.attention_constants(
        num_heads, num_kv_heads, head_dim, page_size, dtype, exact=exact, has_codes=bool(codes)
    )
    num_threads = 32 * attention_constants.attention_options(100, constants, dtype)["num_warps"]
    tile_nbytes = constants["TILE"] * constants["BLOCK_D"] * (1 if codes else dtype.itemsize)
    kind = f"{element}{f'-{codes}' if codes else ''}{'-exact' * exact}{f'-window{window}' * bool(window)}"
    return Configuration(
        name=f"attention-H{num_heads}-K{num_kv_heads}-D{head_dim}-page{page_size}-{kind}{'-sinks' * has_sinks}",
        kernel=attention.attention_kernel,
        types={
            **pointers(element, "q_ptr", "out_ptr", *["sinks_ptr"] * has_sinks),
            **pointers(CODES.get(codes, element), "k_ptr", "v_ptr"),
            **pointers("fp32", "workspace_ptr", "totals_ptr"),
            **pointers("i32", "words_ptr"),
            "q_stride": "i32",
            "workspace_rows": "i32",
            "scale": "fp32",
        },
        constants=constants | {"WINDOW": window} | NO_SINKS[has_sinks],
        divisible=("q_stride",),
        options=lambda arch: attention_constants.attention_options(arch, constants, dtype),
        archs=archs_with(codes),
        has_products=element != "fp32",
        min_wide_loads=2 * tile_nbytes // 16 // num_threads,
        min_programs=lambda arch: (
            attention_constants.WARPS_A_PROCESSOR
            // attention_constants.attention_options(arch, constants, dtype)["num_warps"]
        ),
        min_tiles_ahead=lambda arch: (
            attention_constants.attention_options(arch, constants, dtype)["num_stages"] - 2
        ),
    )


def merge_configuration(
    num_heads: int, num_kv_heads: int, head_dim: int, *, has_sinks: bool = False
) -> Configuration:
    """`merge_kernel` for one shape of heads, in bfloat16."""
    constants = attention_constants.attention_constants(
        num_heads, num_kv_heads, head_dim, 16, torch.bfloat16, exact=True
    )
    return Configuration(
        name=f"attention-merge-H{num_heads}-K{num_kv_heads}-D{head_dim}-bf16{'-sinks' * has_sinks}",
        kernel=attention.merge_kernel,
        types={
            **pointers("bf16", "out_ptr", *["sinks_ptr"] * has_sinks),
            **pointers("fp32", "workspace_ptr", "totals_ptr"),
            **pointers("i32", "words_ptr"),
            "workspace_rows": "i32",
        },
        constants=attention_constants.merge_constants(constants) | NO_SINKS[has_sinks],
        options=same_everywhere(**attention_constants.MERGE_OPTIONS),
    )


def pages_configuration(*, scatter: bool) -> Configuration:
    """`copy_pages_kernel`; pages of real models are multiples of 128 bytes."""
    sizes = ("row_words", "page_words")
    return Configuration(
        name=f"pages-{'scatter' if scatter else 'gather'}",
        kernel=pages.copy_pages_kernel,
        types={
            **pointers("i64", "pages_ptr", "slot_ptr", "pinned_block_ptr"),
            **dict.fromkeys(("first_row", "num_ids", *sizes), "i32"),
        },
        constants={"SCATTER": scatter, "BLOCK_LINES": pages.BLOCK_LINES},
        divisible=sizes,
        options=same_everywhere(**pages.OPTIONS),
        min_wide_loads=2,
    )


def norm_configuration(size: int, has_residual: bool, weight: str = "bf16") -> Configuration:
    """`add_norm_kernel`; the first norm of a forward has no residual."""
    block = max(16, 1 << (size - 1).bit_length())
    return Configuration(
        name=f"add-norm-{size}{'' if has_residual else '-first'}-{weight}",
        kernel=norm.add_norm_kernel,
        types=pointers("bf16", "x", "out", *["residual"] * has_residual)
        | pointers(weight, "weight")
        | {"eps": "fp32"},
        constants={"D": size, "BLOCK": block, "HAS_RESIDUAL": has_residual}
        | ({} if has_residual else {"residual": None}),
        options=same_everywhere(num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False),
    )


def rope_configuration(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    has_norm: bool,
    codes: str = "",
    weight: str = "bf16",
) -> Configuration:
    """`norm_rope_write_kernel`."""
    half = 1 << (head_dim // 2 - 1).bit_length()
    return Configuration(
        name=f"norm-rope-write-H{num_heads}-K{num_kv_heads}-D{head_dim}{f'-norm-{weight}' * has_norm}"
        f"{f'-{codes}' if codes else ''}",
        kernel=rope.norm_rope_write_kernel,
        types={
            **pointers("bf16", "qkv", "cos", "sin", "q"),
            **pointers(weight, *["weight"] * has_norm),
            **pointers(CODES.get(codes, "bf16"), "k_pages", "v_pages"),
            **pointers("i64", "pages", "offsets"),
            "eps": "fp32",
        },
        constants={
            "H": num_heads,
            "K": num_kv_heads,
            "D": head_dim,
            "S": 16,
            "HEADS": rope.HEADS,
            "HALF": half,
        }
        | {"HAS_NORM": has_norm, "HAS_CODES": bool(codes), "LEAST": LEAST}
        | ({} if has_norm else {"weight": None}),
        options=same_everywhere(num_warps=rope.num_warps(head_dim), enable_fp_fusion=False),
        archs=archs_with(codes),
    )


def linear_configuration(
    tile: linear.Tile, element: str = "bf16", *, has_bias: bool = False, even_k: bool = True
) -> Configuration:
    """`linear_kernel`, for the GPUs that have the tile. K is a multiple of 16, and of K_CHUNK with `even_k`."""
    dtype = ELEMENTS[element]
    return Configuration(
        name=f"linear-{tile.m}x{tile.n}-{element}{'-bias' * has_bias}{'' if even_k else '-odd'}",
        kernel=linear.linear_kernel,
        types=pointers(element, "x", "weight", "out", *["bias"] * has_bias) | dict.fromkeys("MNK", "i32"),
        divisible=("N", "K"),
        constants={"BM": tile.m, "BN": tile.n, "BK": linear.K_CHUNK, "GROUP": linear.GROUP}
        | {"HAS_BIAS": has_bias, "EVEN_K": even_k}
        | ({} if has_bias else {"bias": None}),
        archs=[arch for arch in SHARED_NBYTES if tile in linear.tiles_for(divmod(arch, 10), dtype)],
        options=same_everywhere(
            num_warps=tile.num_warps, num_stages=tile.num_stages * 2 // dtype.itemsize, enable_fp_fusion=False
        ),
        has_products=element != "fp32",
        min_programs=lambda arch: tile.num_programs if arch in (90, 100) else 1,
    )


def grouped_configuration(tile: linear.Tile, num_experts: int, fan: int, *, has_bias: bool) -> Configuration:
    """`grouped_linear_kernel` in bfloat16."""
    return Configuration(
        name=f"grouped-{tile.m}x{tile.n}-E{num_experts}-fan{fan}{'-bias' * has_bias}",
        kernel=grouped.grouped_linear_kernel,
        types={
            **pointers("bf16", "x", "out"),
            **pointers("i64", "weights", "pairs", "firsts", "tile_ends", *["biases"] * has_bias),
            **dict.fromkeys(("num_tiles", "N", "D"), "i32"),
        },
        divisible=("N", "D"),
        constants={"E": num_experts, "BLOCK_E": num_experts, "FAN": fan}
        | {"BM": tile.m, "BN": tile.n, "BD": linear.K_CHUNK, "HAS_BIAS": has_bias, "EVEN_D": True}
        | ({} if has_bias else {"biases": None}),
        options=same_everywhere(num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False),
        has_products=True,
        min_tiles_ahead=lambda arch: tile.num_stages - 2,
    )


def grouped_codes_configuration(
    tile: linear.Tile,
    bits: int,
    group_size: int,
    *,
    has_zeros: bool = False,
    is_weight_only: bool = False,
    is_float: bool = False,
    has_bias: bool = False,
) -> Configuration:
    """`grouped_codes_kernel`, with x in bfloat16 or as codes."""
    codes = f"{'fp' if is_float else 'int'}{bits}{'-zeros' * has_zeros}{'-weight-only' * is_weight_only}"
    is_fp8 = is_float and bits == 8
    x_codes = {"x_scales": "*fp32", "x_sums": "*i32"}
    x = {"x": "*fp8e4nv", "x_scales": "*fp32"} if is_fp8 else {"x": "*i8", **x_codes}
    if is_weight_only:
        x = {"x": "*bf16"}
    return Configuration(
        name=f"grouped-codes-{tile.m}x{tile.n}-{codes}-g{group_size}{'-bias' * has_bias}",
        kernel=grouped.grouped_codes_kernel,
        types={
            **pointers("bf16", "out"),
            **x,
            **pointers("i64", "weights", "scales", "pairs", "firsts", "tile_ends"),
            **pointers("i64", *["zeros"] * has_zeros, *["biases"] * has_bias),
            **dict.fromkeys(("num_tiles", "N", "D"), "i32"),
        },
        divisible=("N", "D"),
        constants={"E": 128, "BLOCK_E": 128, "FAN": 8, "BM": tile.m, "BN": tile.n}
        | {"BD": math.gcd(group_size, quantized_linear.MOST_K[bits]), "GROUP_D": group_size, "BITS": bits}
        | {"HAS_ZEROS": has_zeros, "HAS_BIAS": has_bias, "IS_FLOAT": is_float}
        | dict.fromkeys(x_codes.keys() - x.keys())
        | ({} if has_zeros else {"zeros": None})
        | ({} if has_bias else {"biases": None}),
        archs=archs_with("fp8" if is_fp8 else ""),
        options=same_everywhere(num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False),
        has_products=True,
        min_wide_loads=int(group_size > 32),
    )


def sum_experts_configuration(size: int, top_k: int) -> Configuration:
    """`sum_experts_kernel` in bfloat16."""
    return Configuration(
        name=f"sum-experts-{size}-{top_k}",
        kernel=grouped.sum_experts_kernel,
        types=pointers("bf16", "y", "out") | pointers("fp32", "weights") | pointers("i64", "chosen"),
        constants={"D": size, "K": top_k, "BLOCK": grouped.BLOCK},
        options=same_everywhere(num_warps=4, enable_fp_fusion=False),
        min_wide_loads=0,
    )


def quantized_linear_configuration(
    tile: quantized_linear.Tile,
    bits: int,
    group_size: int,
    *,
    is_symmetric: bool = True,
    is_weight_only: bool = False,
    is_float: bool = False,
) -> Configuration:
    """`quantized_linear_kernel`, or `weight_only_kernel`, in bf16."""
    left_out = ([] if not is_symmetric else ["zeros"]) + ["bias"]
    kernel, name, most_k = (
        quantized_linear.quantized_linear_kernel,
        "quantized",
        quantized_linear.MOST_K[bits],
    )
    if is_weight_only:
        kernel, name, rows = quantized_linear.weight_only_kernel, "weight-only", pointers("bf16", "x")
    elif is_float:
        rows, most_k = pointers("fp8e4nv", "x") | pointers("fp32", "x_scales"), quantized_linear.FLOAT_K
        left_out.append("x_sums")
    else:
        rows = pointers("i8", "x") | pointers("fp32", "x_scales") | pointers("i32", "x_sums")
    codes = f"{'fp' if is_float else 'int'}{bits}"
    return Configuration(
        name=f"{name}-{tile.m}x{tile.n}-{codes}-g{group_size}{'' if is_symmetric else '-zeros'}",
        kernel=kernel,
        types=rows
        | pointers("u8", "weight", *[] if is_symmetric else ["zeros"])
        | pointers("fp32", "scales")
        | pointers("bf16", "out")
        | dict.fromkeys("MNK", "i32"),
        divisible=("N", "K"),
        constants={"BM": tile.m, "BN": tile.n, "BK": min(group_size, most_k)}
        | {"GROUP_K": group_size, "BITS": bits, "HAS_ZEROS": not is_symmetric, "HAS_BIAS": False}
        | ({"IS_FLOAT": is_float} if is_weight_only else {})
        | dict.fromkeys(left_out),
        archs=archs_with("fp8" if is_float else ""),
        options=same_everywhere(num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False),
        has_products=True,
        min_wide_loads=int(group_size > 32),
    )


def row_codes_configuration(
    group_size: int, *, has_order: bool = False, is_float: bool = False
) -> Configuration:
    """`row_codes_kernel` of bf16."""
    left_out = [] if has_order else ["order"]
    if is_float:
        left_out.append("sums")
    return Configuration(
        name=f"row-codes-{group_size}{'-order' * has_order}{'-fp8' * is_float}",
        kernel=row_codes.row_codes_kernel,
        types=pointers("bf16", "x")
        | pointers("fp8e4nv" if is_float else "i8", "codes")
        | pointers("fp32", "scales")
        | pointers("i32", *["sums"] * (not is_float))
        | pointers("i64", *["order"] * has_order)
        | {"K": "i32"},
        divisible=("K",),
        constants={"LEAST": LEAST, "GROUP_K": group_size, "BLOCK": group_size, "HAS_ORDER": has_order}
        | dict.fromkeys(left_out),
        archs=archs_with("fp8" if is_float else ""),
        options=same_everywhere(num_warps=row_codes.row_codes_warps(group_size), enable_fp_fusion=False),
        min_wide_loads=int(group_size >= 1024),
    )


def sample_configurations(num_blocks: int) -> list[Configuration]:
    """The kernels of `sampling` over a vocabulary of as many blocks, a power of two."""
    of_rows = {
        **pointers("fp32", "temperatures", "top_ps", "min_ps"),
        **pointers("i64", "top_ks"),
    }
    table = {**pointers("fp32", "tops"), **pointers("i32", "counts"), **pointers("i64", "masses")}
    few = {**pointers("fp32", "few"), **pointers("i32", "few_ids")}
    tokens = TritonTokens()
    constants = {"BLOCK": tokens.block, "NUM_BLOCKS": num_blocks}
    logits = pointers("fp32", "logits")
    drawn = {**of_rows, **pointers("fp64", "uniforms"), **table, **few}
    greedy = {name: kind for name, kind in drawn.items() if name == "tops"}
    parts = [
        Configuration(
            name=f"sample-top-{num_blocks}",
            kernel=sampling.top_kernel,
            types={**logits, **pointers("fp32", "tops"), **pointers("i32", "likeliest"), "V": "i32"},
            divisible=("V",),
            constants={"BLOCK": tokens.block},
            options=same_everywhere(**sampling.OPTIONS),
        ),
        Configuration(
            name=f"sample-octaves-{num_blocks}",
            kernel=sampling.octaves_kernel,
            types={**logits, **pointers("fp32", "temperatures"), **table, "V": "i32"},
            divisible=("V",),
            constants=constants,
            options=same_everywhere(**sampling.OPTIONS),
        ),
        Configuration(
            name=f"sample-candidates-{num_blocks}",
            kernel=sampling.candidates_kernel,
            types={**logits, **of_rows, **table, **few, "V": "i32"},
            divisible=("V",),
            constants={**constants, "FEW": tokens.few},
            options=same_everywhere(**sampling.OPTIONS),
        ),
    ]
    for name, types in (("drawn", drawn), ("greedy", greedy)):
        out = pointers("i32", "likeliest") | pointers("i64", "rows", "last_tokens", "token_ids")
        draw = Configuration(
            name=f"sample-{name}-{num_blocks}",
            kernel=sampling.draw_kernel,
            types={**logits, **types, **out, "V": "i32", "num_blocks": "i32"},
            divisible=("V",),
            constants={
                **constants,
                "FEW": tokens.few,
                "ALL_GREEDY": types is greedy,
                **dict.fromkeys(drawn.keys() - types.keys()),
            },
            options=same_everywhere(**sampling.DRAW_OPTIONS),
            min_wide_loads=int(types is drawn),
        )
        parts.append(draw)
    return parts


OTHERS = [
    *(
        Configuration(
            name="gelu-mul" if is_gelu else "silu-mul",
            kernel=silu_mul.gated_mul_kernel,
            types=pointers("bf16", "gate_up", "out"),
            constants={"F": 14336, "BLOCK": silu_mul.BLOCK, "IS_GELU": is_gelu},
            options=same_everywhere(num_warps=4, enable_fp_fusion=False),
        )
        for is_gelu in (False, True)
    ),
    Configuration(
        name="rotary",
        kernel=rope.rotary_kernel,
        types=pointers("i64", "positions") | pointers("fp32", "waves") | pointers("bf16", "cos", "sin"),
        constants={"R": 64, "BLOCK": 64},
        options=same_everywhere(num_warps=1, enable_fp_fusion=False),
        min_wide_loads=0,
        max_stack_nbytes=32,  # sine and cosine of large angles, with Triton 3.6
    ),
    Configuration(
        name="resolve",
        kernel=resolve.resolve_kernel,
        types=pointers("i64", "input_ids", "write_rows", "write_tokens", "last_tokens", "out")
        | dict.fromkeys("TW", "i32"),
        constants={"BLOCK": resolve.BLOCK},
        options=same_everywhere(num_warps=8, enable_fp_fusion=False),
        min_wide_loads=0,
    ),
    Configuration(
        name="penalize",
        kernel=adjust.penalize_kernel,
        types={
            **pointers("fp32", "logits", "frequency", "presence", "repetition"),
            **pointers("i64", "entries", "slots"),
            **pointers("i32", "num_output"),
            **pointers("u8", "is_known"),
            "V": "i32",
        },
        divisible=("V",),
        constants={"BLOCK": 1024},
        options=same_everywhere(num_warps=4, enable_fp_fusion=False),
    ),
    Configuration(
        name="bias",
        kernel=adjust.bias_kernel,
        types={
            **pointers("fp32", "logits", "bias_values"),
            **pointers("i64", "bias_entries", "bias_ids", "masked_entries", "masked_ids"),
            **dict.fromkeys(("num_biases", "num_masked", "V"), "i32"),
        },
        divisible=("V",),
        constants={"LIST": adjust.LIST},
        options=same_everywhere(num_warps=8, enable_fp_fusion=False),
        min_wide_loads=0,
    ),
    Configuration(
        name="vocab-mask",
        kernel=adjust.vocab_mask_kernel,
        types=pointers("fp32", "logits") | pointers("i64", "entries") | pointers("i32", "allowed")
        | dict.fromkeys("VW", "i32"),
        divisible=("V",),
        constants={"BLOCK": TritonTokens().block},
        options=same_everywhere(num_warps=16, enable_fp_fusion=False),
    ),
]  # fmt: skip

CONFIGURATIONS = [
    attention_configuration(32, 8, 128),
    attention_configuration(32, 8, 128, exact=True),
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
    attention_configuration(40, 8, 128, exact=True),
    attention_configuration(9, 3, 64, exact=True),
    attention_configuration(16, 8, 128, page_size=1, exact=True),
    attention_configuration(16, 2, 256, exact=True),
    attention_configuration(16, 8, 128, "fp32", exact=True),
    attention_configuration(32, 8, 128, window=4096),
    attention_configuration(32, 8, 128, exact=True, window=4096),
    attention_configuration(4, 1, 256, window=512),
    attention_configuration(4, 1, 256, exact=True, window=512),
    attention_configuration(64, 8, 64, window=128, has_sinks=True),
    attention_configuration(64, 8, 64, exact=True, window=128, has_sinks=True),
    attention_configuration(64, 8, 64, has_sinks=True),
    attention_configuration(64, 8, 64, exact=True, has_sinks=True),
    attention_configuration(32, 8, 128, codes="int8"),
    attention_configuration(32, 8, 128, exact=True, codes="int8"),
    attention_configuration(9, 3, 64, codes="int8"),
    attention_configuration(16, 2, 256, codes="int8"),
    attention_configuration(32, 8, 128, codes="fp8"),
    attention_configuration(32, 8, 128, exact=True, codes="fp8"),
    attention_configuration(9, 3, 64, codes="fp8"),
    attention_configuration(16, 2, 256, codes="fp8"),
    merge_configuration(32, 8, 128),
    merge_configuration(9, 3, 64),
    merge_configuration(64, 8, 64, has_sinks=True),
    merge_configuration(32, 32, 96),
    merge_configuration(16, 2, 256),
    norm_configuration(4096, has_residual=True),
    norm_configuration(4096, has_residual=False),
    norm_configuration(1000, has_residual=True),
    norm_configuration(1152, has_residual=True, weight="fp32"),
    rope_configuration(32, 8, 128, has_norm=False),
    rope_configuration(32, 8, 128, has_norm=True),
    rope_configuration(32, 32, 96, has_norm=False),
    rope_configuration(16, 2, 256, has_norm=True),
    rope_configuration(4, 1, 256, has_norm=True, weight="fp32"),
    rope_configuration(32, 8, 128, has_norm=False, codes="int8"),
    rope_configuration(32, 8, 128, has_norm=True, codes="int8"),
    rope_configuration(16, 2, 256, has_norm=True, codes="int8"),
    rope_configuration(32, 8, 128, has_norm=False, codes="fp8"),
    rope_configuration(16, 2, 256, has_norm=True, codes="fp8"),
    *(linear_configuration(tile) for tile in linear.TILES),
    *(linear_configuration(tile, has_bias=True) for tile in linear.TILES),
    *(linear_configuration(tile, "fp16") for tile in linear.TILES),
    linear_configuration(linear.NARROW, even_k=False),
    *(
        grouped_configuration(tile, 128, fan, has_bias=has_bias)
        for tile in (linear.FEW, grouped.MANY)
        for fan in (1, 8)
        for has_bias in (False, True)
    ),
    *(
        grouped_codes_configuration(
            tile, *of, has_bias=has_bias, has_zeros=has_zeros, is_weight_only=is_weight_only
        )
        for tile in (grouped.CODES_FEW, grouped.CODES_MANY)
        for of in ((8, 4096), (4, 128), (4, 32))
        for has_bias, has_zeros in ((False, False), (False, True))
        for is_weight_only in (False, True)
    ),
    *(
        grouped_codes_configuration(
            tile, bits, group_size, is_weight_only=is_weight_only, is_float=True, has_bias=has_bias
        )
        for tile in (grouped.CODES_FEW, grouped.CODES_MANY)
        for bits, group_size, is_weight_only, has_bias in (
            (8, 128, True, False),
            (8, 4096, True, False),
            (8, 128, False, False),
            (8, 4096, False, False),
            (4, 32, False, True),
            (4, 32, True, True),
        )
    ),
    sum_experts_configuration(4096, 8),
    linear_configuration(linear.FLOAT32, "fp32"),
    *(
        quantized_linear_configuration(tile, *of, is_symmetric=is_symmetric, is_weight_only=is_weight_only)
        for tile in (quantized_linear.FEW, quantized_linear.MANY)
        for of in ((8, 4096), (4, 128), (4, 32))
        for is_symmetric in (True, False)
        for is_weight_only in (False, True)
    ),
    *(
        quantized_linear_configuration(tile, 8, group_size, is_weight_only=True, is_float=True)
        for tile in (quantized_linear.FEW, quantized_linear.MANY)
        for group_size in (4096, 128)
    ),
    *(
        quantized_linear_configuration(tile, 8, group_size, is_float=True)
        for tile in (quantized_linear.FLOAT_FEW, quantized_linear.FLOAT_MANY)
        for group_size in (4096, 128)
    ),
    row_codes_configuration(4096),
    row_codes_configuration(128),
    row_codes_configuration(128, has_order=True),
    row_codes_configuration(4096, is_float=True),
    row_codes_configuration(128, is_float=True),
    *sample_configurations(64),
    *sample_configurations(1),
    pages_configuration(scatter=False),
    pages_configuration(scatter=True),
    *OTHERS,
]
