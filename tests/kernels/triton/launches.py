"""Call each launcher as on an H200, and compare what Triton would compile with `configurations.py`.

`python -m tests.kernels.triton.launches` prints each launch that no configuration describes. Nothing is compiled or
launched: Triton's driver is a fake, and its cache hook says that another process will compile.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from shared.kernels.triton import adjust, linear, norm, pages, resolve, rope, sampling, silu_mul
from shared.kernels.triton.attention import PagedAttention
from tests.kernels.triton.configurations import CONFIGURATIONS
from tests.kernels.triton.cubins import Configuration

ARCH = 90
CPU = torch.device("cpu")


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

    num: int = 0
    faults: list[str] = field(default_factory=list)

    def hook(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """True: do not compile."""
        self.num += 1
        kernel = fn.jit_function
        names = kernel.arg_names
        types = {name: kind for name, kind in compile["signature"].items() if kind != "constexpr"}
        constants = {names[at]: value for (at,), value in compile["constants"].items()}
        aligned = {names[at] for (at,), attributes in compile["configs"][0].items() if attributes}
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        seen = types, constants, aligned, options
        listed = [expected(each, options) for each in CONFIGURATIONS if each.kernel is kernel]
        if seen not in listed:
            self.faults.append(
                f"{kernel.__name__}:\n  {seen}\nis none of\n" + "\n".join(f"  {e}" for e in listed)
            )
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


def launch_all(T: int) -> None:
    """The shapes of an 8B, with T tokens and few pages."""
    bf16, int64 = {"dtype": torch.bfloat16}, {"dtype": torch.int64}
    ids, floats = torch.zeros(T, **int64), torch.zeros(T)
    x, weight = torch.zeros(T, 4096, **bf16), torch.zeros(4096, **bf16)
    kv = torch.zeros(4, 8, 16, 128, **bf16)
    attention = PagedAttention(
        num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, device=CPU,
        workspace_nbytes=1 << 20,
    )  # fmt: skip
    qkv = torch.zeros(T, 48, 128, **bf16)
    attention(qkv[:, :32], kv, kv.clone(), torch.zeros(64, dtype=torch.int32))
    norm.add_norm(x, x.clone(), weight, 1e-5)
    norm.add_norm(x, None, weight, 1e-5)
    cos, sin = rope.rotary(ids, torch.zeros(64), torch.bfloat16)
    rope.norm_rope_write(qkv, 8, None, 1e-5, cos, sin, ids, ids.clone(), kv, kv.clone())
    silu_mul.silu_mul(torch.zeros(T, 2 * 14336, **bf16))
    for tile in linear.TILES:
        linear.linear(x, torch.zeros(64, 4096, **bf16), None, tile, 4)
    linear.linear(x, torch.zeros(64, 4096, **bf16), torch.zeros(64, **bf16), linear.NARROW, 4)
    resolve.resolve(ids, ids.clone(), ids.clone(), ids.clone())
    logits = torch.zeros(T, 151936)
    drawn = sampling.Params(
        floats, ids.clone(), floats.clone(), floats.clone(), torch.zeros(T, dtype=torch.float64)
    )
    for params in (None, drawn):
        sampling.sample(logits, params, ids, ids.clone())
    counts = torch.zeros(4, 151936, dtype=torch.int32)
    adjust.penalize(logits, ids, ids, floats, floats, floats, counts, counts.bool())
    adjust.add_biases(logits, (ids, ids, floats), (ids, ids))
    adjust.apply_vocab_mask(logits, ids, torch.zeros(T, 4748, dtype=torch.int32))
    pool = torch.zeros(4, 4, kv[0].nbytes, dtype=torch.uint8)
    for scatter in (False, True):
        pages.copy_pages(
            pool,
            range(4),
            torch.zeros(4, T, pool.shape[2], dtype=torch.uint8),
            torch.zeros(2 + T, **int64),
            scatter=scatter,
        )


def main() -> int:
    """1 if a launch has a fault."""
    launches = Launches()
    triton.runtime.driver.set_active(NoGpu())
    triton.knobs.runtime.jit_cache_hook = launches.hook
    for num_tokens in (1, 16):  # an argument of 1 would be a constant, and the binary another one
        launch_all(num_tokens)
    print(*launches.faults, sep="\n")
    print(f"{launches.num} launches, {len(launches.faults)} that no configuration describes")
    return int(bool(launches.faults))


if __name__ == "__main__":
    sys.exit(main())
