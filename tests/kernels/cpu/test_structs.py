"""The structs that Python fills are those that C++ reads: sizes, offsets, and which fields are pointers."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from shared.kernels.cpu.build import FLAGS, NativeUnavailable, find_compiler
from shared.kernels.cpu.decoder import (
    BatchDesc,
    DecoderDesc,
    ExpertsDesc,
    KVPool,
    LayerDesc,
    LinearDesc,
    Sampling,
)
from shared.kernels.cpu.library import SRC
from tests.kernels.cpu.linear import CodesDesc, RowsDesc
from tests.patience import PATIENCE_S

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "Codes": CodesDesc,
    "PackedLinear": LinearDesc,
    "Rows": RowsDesc,
    "ExpertsDesc": ExpertsDesc,
    "LayerDesc": LayerDesc,
    "DecoderDesc": DecoderDesc,
    "KVPool": KVPool,
    "BatchDesc": BatchDesc,
    "Sampling": Sampling,
}


class SwappedPool(ctypes.Structure):
    """Of the right size, with two fields that have traded places."""

    _fields_ = (("pages", ctypes.c_void_p), ("page_size", ctypes.c_int64), ("num_pages", ctypes.c_int64))


def refused(structs: dict[str, type[ctypes.Structure]], *flags: str) -> str:
    """What the compiler, called with these `flags` too, has against these layouts."""
    lines = ["#include <cstddef>", "#include <type_traits>", '#include "decoder.h"', '#include "sampling.h"']
    lines += ["using namespace baton;"]
    for name, struct in structs.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field, kind in struct._fields_:
            lines.append(
                f'static_assert(offsetof({name}, {field}) == {getattr(struct, field).offset}, "{name}.{field}");'
            )
            is_pointer = str(kind is ctypes.c_void_p).lower()
            lines.append(f"static_assert(std::is_pointer_v<decltype({name}::{field})> == {is_pointer});")
    try:
        # Without AVX2, g++ warns that a vector of 256 bits is returned in another way. No kernel runs there.
        flags = (*FLAGS, *flags, "-Wno-psabi")
        command = [find_compiler(), *flags, f"-I{SRC}", "-fsyntax-only", "-x", "c++", "-"]
    except NativeUnavailable as e:
        pytest.skip(f"NO COMPILER: {e}")
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


@pytest.mark.parametrize("flags", [(), ("-mno-avx2",)], ids=["this-cpu", "no-avx2"])
def test_every_struct_is_laid_out_as_in_cpp(flags: tuple[str, ...]) -> None:
    assert refused(STRUCTS, *flags) == ""


def test_another_order_of_fields_would_be_seen() -> None:
    assert "KVPool.page_size" in refused({"KVPool": SwappedPool})
