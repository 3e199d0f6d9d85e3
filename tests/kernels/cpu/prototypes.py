"""Single native kernels, which a decoder calls from C++ and only tests and benches call from Python."""

from __future__ import annotations

import ctypes

from shared.kernels.cpu.library import Team

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64
_Float = ctypes.c_float
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "baton_linear",
            "baton_linear_float",
            "baton_linear_add",
            "baton_linear_silu_mul",
            "baton_linear_gelu_mul",
        ),
        (_Pointer, _Pointer, _Int, _Pointer, _Pointer),
    ),
    "baton_experts": (_Pointer, _Pointer, _Pointer, _Pointer, _Int, _Pointer),
    "baton_quantize": (_Pointer, _Pointer, _Int, _Pointer),
    "baton_rms_norm_codes": (_Pointer, _Pointer, _Int, _Int, _Pointer, _Float, _Pointer),
    **dict.fromkeys(
        ("baton_decode_attention", "baton_extend_attention"),
        (*(_Pointer,) * 4, *(_Int,) * 5, _Pointer, _Int, *(_Pointer,) * 2, *(_Int,) * 2, *(_Pointer,) * 2),
    ),
    "baton_embed": (_Pointer, _Pointer, _Int, _Pointer, _Int, _Float, _Pointer),
    "baton_add_rms_norm": (_Pointer, _Pointer, _Int, _Int, _Pointer, _Float, _Pointer),
    "baton_rms_norm": (_Pointer, _Pointer, _Int, _Int, _Pointer, _Float, _Pointer),
    "baton_rotary_cos_sin": (_Pointer, _Pointer, _Int, _Pointer, _Int, _Pointer),
    "baton_norm_rope_write": (
        *(
            _Pointer,
            _Pointer,
            *(_Int,) * 4,
            _Pointer,
            _Float,
            *(_Pointer,) * 3,
            *(_Int,) * 2,
            *(_Pointer,) * 3,
        ),
    ),
}


def kernel(team: Team, name: str) -> ctypes._NamedFuncPointer:
    """A function of the team's library; the team's handle is the first of its arguments."""
    function = team.library[name]
    function.restype, function.argtypes = None, _ARGUMENTS[name]
    return function
