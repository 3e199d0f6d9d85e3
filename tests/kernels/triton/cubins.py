"""Compile Triton kernels for GPUs that are not here, and read from the cubins what would make them slow.

`python -m tests.kernels.triton.cubins [--first] [NAME ...]` compiles the configurations of `configurations.py`, or of
those that contain a NAME, for each architecture, with the Triton that is first on the path. `--first` compiles the
first configuration of each kernel for sm_90 alone. cuobjdump and nvdisasm come with Triton.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_NBYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""The most shared memory of one program, by architecture (CUDA programming guide, compute capabilities).

A multiprocessor has 1 KiB more, and each program takes 1 KiB beside its own.
"""
NUM_REGISTERS = 1 << 16
"""Of a multiprocessor, for each of these architectures."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DOT = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
"""Products in TTGIR."""
SPILLS, MATRIX = r"\b(LDL|STL)\b", r"\b(UTC)?[HIQ]G?MMA\b"
WIDE_LOADS = r"\b(LDG|LDGSTS)\.E[.\w]*\.128\b|\bUTMALDG\b"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A kernel as a launcher compiles it. The arguments' names are those of the kernel's parameters."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Of each argument that is no constexpr: "*bf16", "i32", "fp32", .. Pointers are aligned to 16 bytes."""
    constants: Mapping[str, object]
    options: Callable[[int], Mapping[str, object]]
    """num_warps, num_stages and enable_fp_fusion for an architecture."""
    divisible: Sequence[str] = ()
    """Integers that are multiples of 16 in every launch."""
    has_products: bool = False
    min_wide_loads: int = 1
    """Loads of 16 bytes that the code must have, for what is read most."""
    min_tiles_ahead: Callable[[int], int] = lambda arch: 0
    """Turns of its loops for which keys and values are still on their way when one begins, for an architecture."""
    min_programs: Callable[[int], int] = lambda arch: 1
    """Programs that a launcher expects to run beside each other on one multiprocessor, for an architecture."""
    max_stack_nbytes: int = 0
    """More than 0 where a function of CUDA's library has memory of its own."""
    archs: Sequence[int] = tuple(SHARED_NBYTES)

    def aligned(self) -> set[str]:
        """The arguments that Triton knows to be multiples of 16."""
        specialized = {
            p.name for p in self.kernel.params if not p.do_not_specialize | p.do_not_specialize_on_alignment
        }
        names = {*self.divisible, *(name for name, kind in self.types.items() if kind[0] == "*")}
        return names & specialized


@dataclass(frozen=True)
class Cubin:
    """What the tools say of one compiled kernel."""

    registers: int
    stack_nbytes: int
    shared_nbytes: int
    spills: int
    wide_loads: int
    matrix_instructions: int
    tiles_ahead: int
    """The fewest of any loop that computes while its next turns are loaded. A turn waits for keys and values."""

    def programs(self, num_warps: int, arch: int) -> int:
        """How many run beside each other on one multiprocessor, as registers and shared memory allow.

        A warp's registers are taken 256 at a time.
        """
        num_registers = -(-self.registers // 8) * 8 * 32 * num_warps
        shared_nbytes = SHARED_NBYTES[arch] + (1 << 10)
        return min(NUM_REGISTERS // num_registers, shared_nbytes // (self.shared_nbytes + (1 << 10)))

    def faults(self, configuration: Configuration, arch: int) -> list[str]:
        """Each gate that the kernel does not pass, in words."""
        found = []
        if self.stack_nbytes > configuration.max_stack_nbytes or (self.spills and not self.stack_nbytes):
            found.append(f"spills: {self.stack_nbytes} bytes of stack, {self.spills} loads and stores")
        if self.shared_nbytes > SHARED_NBYTES[arch]:
            found.append(f"{self.shared_nbytes} bytes of shared memory, of {SHARED_NBYTES[arch]}")
        if self.wide_loads < configuration.min_wide_loads:
            found.append(f"{self.wide_loads} loads of 16 bytes, not {configuration.min_wide_loads}")
        if configuration.has_products and not self.matrix_instructions:
            found.append("no tensor core instructions")
        if self.tiles_ahead < (ahead := configuration.min_tiles_ahead(arch)):
            found.append(f"loads are {self.tiles_ahead} turns ahead, not {ahead}")
        num_programs = self.programs(int(str(configuration.options(arch)["num_warps"])), arch)
        if num_programs < (least := configuration.min_programs(arch)):
            found.append(f"{num_programs} programs fit a multiprocessor, not {least}")
        return found


def build(configuration: Configuration, arch: int) -> Cubin:
    """Compile for sm_`arch` and disassemble."""
    names = configuration.kernel.arg_names
    constants = configuration.constants
    assert {*configuration.types, *constants} == {*names}, f"{configuration.name}: its parameters are {names}"
    aligned = configuration.aligned()
    source = ASTSource(
        fn=configuration.kernel,
        signature={name: configuration.types.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    options = configuration.options(arch)
    assert "enable_fp_fusion" in options, f"{configuration.name}: Triton's default changes with its version"
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = _said_by("cuobjdump", "--dump-resource-usage", file.name)
        code = _said_by("nvdisasm", "--print-code", file.name)
    registers, stack = (int(re.findall(rf"\b{name}:(\d+)", resources)[-1]) for name in ("REG", "STACK"))
    return Cubin(
        registers,
        stack,
        compiled.metadata.shared,
        *(len(re.findall(pattern, code)) for pattern in (SPILLS, WIDE_LOADS, MATRIX)),
        tiles_ahead(compiled.asm["ttgir"]),
    )


def tiles_ahead(ttgir: str) -> int:
    """How many turns before its use a turn's two loads are begun, in the loop of products of which it is least.

    0 without such a loop. Of a loop's `async_wait`, `num` is the number of loads that may still be on their way.
    """
    loops = [loop for loop in re.findall(r"scf\.for .*?scf\.yield", ttgir, re.DOTALL) if DOT.search(loop)]
    waits = [re.search(r"async_wait.*?num = (\d+)", loop) for loop in loops]
    return min((int(wait[1]) // 2 if wait else 0 for wait in waits), default=0)


def _said_by(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def checked(build_of: tuple[int, int]) -> tuple[str, list[str]]:
    """Compile configuration [0] for sm_[1]; a line about it, and its faults."""
    from tests.kernels.triton.configurations import CONFIGURATIONS

    configuration, arch = CONFIGURATIONS[build_of[0]], build_of[1]
    cubin = build(configuration, arch)
    faults = cubin.faults(configuration, arch)
    line = (
        f"sm_{arch:<3} {configuration.name:<40} {cubin.registers:3} registers {cubin.shared_nbytes:6} shared "
        f"{cubin.wide_loads:3} wide loads {cubin.matrix_instructions:3} mma  {'; '.join(faults) or 'ok'}"
    )
    return line, faults


def chosen(names: Sequence[str], first: bool) -> list[tuple[int, int]]:
    """Configurations by their number, each with an architecture."""
    from tests.kernels.triton.configurations import CONFIGURATIONS

    kernels = [configuration.kernel for configuration in CONFIGURATIONS]
    return [
        (i, arch)
        for i, configuration in enumerate(CONFIGURATIONS)
        if not names or any(name in configuration.name for name in names)
        for arch in ((90,) if first else configuration.archs)
        if not first or kernels.index(configuration.kernel) == i
    ]


def main() -> int:
    """Print a line for each cubin, and 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--first", action="store_true")
    args = parser.parse_args()
    builds, num_faults = chosen(args.names, args.first), 0
    if not builds:
        parser.error(f"no configuration has {args.names} in its name")
    # Forked processes would share the locks of LLVM's threads.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for line, faults in pool.map(checked, builds):
            print(line, flush=True)
            num_faults += bool(faults)
    print(f"Triton {triton.__version__}: {len(builds)} cubins, {num_faults} at fault")
    return int(num_faults > 0)


def pointers(kind: str, *names: str) -> dict[str, str]:
    """`types` of several pointers: pointers("bf16", "q", "k") is {"q": "*bf16", "k": "*bf16"}."""
    return dict.fromkeys(names, f"*{kind}")


def same_everywhere(**options: object) -> Callable[[int], Mapping[str, object]]:
    """`options` that are the same on every architecture."""
    return partial(_given, options)


def _given(options: Mapping[str, object], arch: int) -> Mapping[str, object]:
    return options


if __name__ == "__main__":
    sys.exit(main())
