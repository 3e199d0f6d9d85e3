"""Run whole forwards as on an H200, and compare what Triton would compile with `configurations.py`.

`python -m tests.kernels.triton.launches` prints each launch that no configuration describes. Nothing is compiled or
launched: Triton's driver is a fake, its cache hook says that another process will compile, and tensors are on torch's
meta device. So a forward or its sampling that waits for a value raises, and so does one that mixes host and device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product as pairs_of
from typing import Any

import torch
import triton
from torch.nn.functional import linear
from triton.backends.compiler import GPUTarget

from shared.engine.cuda.batches import EVERYTHING, GREEDY, Extend
from shared.engine.cuda.triton_kernels import make_triton_kernels
from shared.engine.cuda.triton_ops import multiply_quantized, stack_of
from shared.kernels.triton.grouped import Groups, grouped_linear, tile_rows
from shared.kernels.triton.linear import ExactLinear
from shared.kernels.triton.pages import copy_pages
from shared.model.linear import QuantizedLinear
from tests.kernels.triton.configurations import CONFIGURATIONS
from tests.kernels.triton.cubins import Configuration
from tests.meta_rig import META, MetaRig
from tests.token_engine import token_model_config

ARCH = 90
MODEL = partial(
    token_model_config,
    vocab_size=151936,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
)
"""One layer of an 8B."""
QWEN2, QWEN3 = {"architectures": ["Qwen2ForCausalLM"]}, {"architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 14336,
}
FORWARDS: list[tuple[list[Extend], list[tuple[int, int]]]] = [
    *(([Extend(0, 0, [0] * length)], []) for length in (1, 16, 256, 2048)),
    ([], [(0, 40)]),
    ([], [(0, 4000)]),
    ([Extend(0, 3, [0, 0])], [(1, 7), (2, 70)]),
]
"""An argument of 1 would be a constant, and the binary another one."""


class NoGpu:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Launches:
    """Every launch that came along, and what is wrong with it."""

    kernels: set[str] = field(default_factory=set)
    faults: dict[str, None] = field(default_factory=dict)

    def hook(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """True: do not compile."""
        kernel = fn.jit_function
        self.kernels.add(kernel.__name__)
        names = kernel.arg_names
        types = {name: kind for name, kind in compile["signature"].items() if kind != "constexpr"}
        constants = {names[at]: value for (at,), value in compile["constants"].items()}
        aligned = {names[at] for (at,), attributes in compile["configs"][0].items() if attributes}
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        seen = types, constants, aligned, options
        listed = [expected(each, options) for each in CONFIGURATIONS if each.kernel is kernel]
        if seen not in listed:
            fault = f"{kernel.__name__}:\n  {seen}\nis none of\n" + "\n".join(f"  {e}" for e in listed)
            self.faults[fault] = None
        return True


def expected(configuration: Configuration, seen: dict[str, Any]) -> tuple[object, ...]:
    """As `hook` sees it. An option that a configuration leaves to Triton may be anything."""
    types = dict(configuration.types)
    return (
        types,
        dict(configuration.constants),
        configuration.aligned(),
        seen | dict(configuration.options(ARCH)),
    )


def launch_all() -> None:
    """Forwards with every feature of sampling and without, for all kinds of projections, and copies of pages."""
    exact = ExactLinear(132)
    for changes, product, kv_dtype in (
        ({}, exact, torch.bfloat16),
        (QWEN3, exact, torch.bfloat16),
        (QWEN2, exact, torch.bfloat16),
        ({}, linear, torch.bfloat16),
        ({}, linear, torch.int8),
        (QWEN3, exact, torch.int8),
        (QWEN3_MOE, linear, torch.bfloat16),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, linear, torch.bfloat16),
        ({}, linear, torch.float8_e4m3fn),
    ):
        model = MODEL(**changes)
        kernels = partial(make_triton_kernels, model, torch.bfloat16, product=product, numerics="")
        rig = MetaRig(model, make_kernels=kernels, context_length=4096, kv_dtype=kv_dtype)
        for extends, decodes in FORWARDS:
            for params in (GREEDY, EVERYTHING):
                rig.run(extends, decodes, params, with_grammars=params is EVERYTHING)
    for num_rows, layer in pairs_of((1, 300), quantized_layers()):
        x = torch.empty(num_rows, 4096, dtype=torch.bfloat16, device=META)
        for is_weight_only in (False, True):
            multiply_quantized(x, replace(layer, is_weight_only=is_weight_only))
        if layer.bits == 8:
            for is_weight_only in (False, True):
                multiply_quantized(x, replace(layer, is_weight_only=is_weight_only, is_float=True))
        stack = stack_of([replace(layer, order_K=None, is_weight_only=num_rows == 1)] * 128)
        chosen_TK = torch.empty(num_rows, 8, dtype=torch.int64, device=META)
        groups = Groups.of(chosen_TK, 128, tile_rows(8 * num_rows, 128, torch.bfloat16))
        grouped_linear(x, stack, groups, 8, 132)
    pages = torch.empty(4, 4, 2 * 8 * 16 * 128, dtype=torch.uint8, device=META)
    for num_ids in (1, 16):
        slot = torch.empty(4, num_ids, pages.shape[2], dtype=torch.uint8, device=META)
        for scatter in (False, True):
            block = torch.empty(1 + num_ids + 4 * num_ids, dtype=torch.int64, device=META)
            copy_pages(pages, range(4), slot, block, scatter=scatter)


def quantized_layers() -> Iterator[QuantizedLinear]:
    """W8A8, and 4 bits in groups, with zeros and an order too."""
    for bits, group_size, has_zeros in ((8, 4096, False), (4, 128, False), (4, 128, True)):
        num_groups = 4096 // group_size
        yield QuantizedLinear(
            codes_NK=torch.empty(6144, 4096 * bits // 8, dtype=torch.uint8, device=META),
            bits=bits,
            scales_NG=torch.empty(6144, num_groups, device=META),
            zeros_NG=torch.empty(6144, num_groups, dtype=torch.uint8, device=META) if has_zeros else None,
            is_packed=bits == 4,
            order_K=torch.empty(4096, dtype=torch.int64, device=META) if has_zeros else None,
        )


def require_device(*args: Any, **kwargs: Any) -> None:
    """Refuse a launch with a tensor of the host."""
    assert all(arg.device == META for arg in args if isinstance(arg, torch.Tensor)), "a pointer to the host"


def main() -> int:
    """1 if a launch has a fault, or if there is none of some kernel."""
    launches = Launches()
    triton.runtime.driver.set_active(NoGpu())
    triton.knobs.runtime.jit_cache_hook = launches.hook
    kernels = {configuration.kernel.__name__: configuration.kernel for configuration in CONFIGURATIONS}
    for kernel in kernels.values():
        kernel.add_pre_run_hook(require_device)
    launch_all()
    print(*launches.faults, sep="\n")
    missing = sorted({*kernels} - launches.kernels)
    print(f"{len(launches.faults)} launches that no configuration describes, not launched: {missing}")
    return int(bool(launches.faults or missing))


if __name__ == "__main__":
    sys.exit(main())
