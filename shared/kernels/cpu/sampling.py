"""Samples token ids from logits in one native call. The slow twin is `draw` of `shared/engine/sampler.py`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from shared.kernels.cpu.library import Team, check_status

_Pointer = ctypes.c_void_p


class Sampling(ctypes.Structure):
    """Sampling parameters of S rows, as in `src/sampling.h`. Without arrays, every row takes its likeliest token."""

    _fields_ = (
        ("temperatures", _Pointer),
        ("top_ks", _Pointer),
        ("top_ps", _Pointer),
        ("min_ps", _Pointer),
        ("uniforms", _Pointer),
    )

    @classmethod
    def of(
        cls,
        temperatures_S: np.ndarray,
        top_ks_S: np.ndarray,
        top_ps_S: np.ndarray,
        min_ps_S: np.ndarray,
        uniforms_S: np.ndarray,
    ) -> Sampling:
        """Make the struct of float32, int64, float32, float32 and float64 arrays, which the caller keeps alive."""
        arrays = (temperatures_S, top_ks_S, top_ps_S, min_ps_S, uniforms_S)
        assert [str(array.dtype) for array in arrays] == ["float32", "int64", "float32", "float32", "float64"]
        return cls(*(array.ctypes.data for array in arrays))


def sample(
    team: Team,
    logits_SV: torch.Tensor,
    sampling: Sampling,
    rows_S: torch.Tensor,
    last_token_R: torch.Tensor,
) -> torch.Tensor:
    """Return the next token ids, int64 [S]. They are also written to `last_token_R[rows_S]`, int64.

    `logits_SV` is float32, and a row that draws is overwritten. Raises MemoryError.
    """
    num_rows, vocab_size = logits_SV.shape
    assert logits_SV.dtype == torch.float32 and logits_SV.is_contiguous()
    assert rows_S.dtype == last_token_R.dtype == torch.int64 and len(rows_S) == num_rows
    token_ids_S = torch.empty(num_rows, dtype=torch.int64)
    check_status(
        team.library.baton_sample(
            team.handle,
            logits_SV.data_ptr(),
            num_rows,
            vocab_size,
            ctypes.byref(sampling),
            rows_S.data_ptr(),
            last_token_R.data_ptr(),
            token_ids_S.data_ptr(),
        )
    )
    return token_ids_S
