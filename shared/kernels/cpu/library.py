"""Loads the native kernels, whose functions are `extern "C" baton_*` at the end of each file in `src/`.

ctypes releases the GIL while a kernel runs. Prototypes of single kernels, which only tests call, are in tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.kernels.cpu.build import NativeUnavailable, cpu_flags, do_nothing, is_intel, open_library

SRC = Path(__file__).parent / "src"
NEEDED_CPU_FLAGS = ("avx2", "fma")
NO_BF16 = ("-mno-avx512bf16",)

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64

_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "baton_team_new": (_Pointer, (_Pointer, _Int)),
    "baton_team_free": (None, (_Pointer,)),
    "baton_numerics": (ctypes.c_char_p, ()),
    **dict.fromkeys(
        ("baton_pack_linear", "baton_pack_gate_up"),
        (None, (_Pointer, _Pointer, _Int, _Int, _Int, _Pointer, _Int)),
    ),
    "baton_decoder_new": (_Pointer, (_Pointer, _Pointer, _Pointer)),
    "baton_decoder_free": (None, (_Pointer,)),
    "baton_decoder_forward": (_Int, (_Pointer, _Pointer)),
    "baton_decoder_logits": (_Int, (_Pointer, _Pointer, _Int, _Pointer)),
    "baton_sample": (_Int, (_Pointer, _Pointer, _Int, _Int, _Pointer, _Pointer, _Pointer, _Pointer)),
}


def load_library(*flags: str, on_build: Callable[[], None] = do_nothing) -> ctypes.CDLL:
    """Load the kernels, built now unless they are cached. Tests add compiler `flags`. Raises NativeUnavailable."""
    missing = [flag for flag in NEEDED_CPU_FLAGS if flag not in cpu_flags()]
    if missing:
        raise NativeUnavailable(f"this CPU lacks {missing[0]}")
    sources, headers = sorted(SRC.glob("*.cpp")), sorted(SRC.glob("*.h"))
    flags = (*(NO_BF16 if is_bf16_slow() else ()), *flags)
    library = open_library("kernels", sources, headers, flags=flags, on_build=on_build)
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def is_bf16_slow() -> bool:
    """Whether this CPU multiplies float32 faster than bf16: Intel's, with AVX512 and without AMX.

    Its vdpbf16ps does the work of two fmas in the time of four (docs/performance.md).
    """
    return is_intel() and "amx_bf16" not in cpu_flags()


def numerics(library: ctypes.CDLL) -> str:
    """Return what decides about the bits of a result: `VERSION/INSTRUCTION_SET` (`src/numerics.cpp`)."""
    return str(library.baton_numerics().decode())


class Team:
    """The threads of a kernel, one for each of `cores` (-1: not pinned). The calling thread is the first of them.

    Raises NativeUnavailable where the system does not start that many threads.
    """

    def __init__(self, library: ctypes.CDLL, cores: Sequence[int]) -> None:
        assert cores, "a team needs a core"
        self.library = library
        self.handle: int | None = library.baton_team_new((ctypes.c_int32 * len(cores))(*cores), len(cores))
        if self.handle is None:
            raise NativeUnavailable(f"{len(cores)} threads cannot be started (a limit of processes?)")

    def close(self) -> None:
        """End the threads. No kernel may be running."""
        if self.handle is not None:
            self.library.baton_team_free(self.handle)
            self.handle = None
