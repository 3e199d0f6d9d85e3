"""What stands between the linear layers, natively: embedding, RMSNorm, QK-norm with RoPE and the KV write.

The residual stream is float32, what enters a linear layer is bf16, and each result is rounded once. The slow twins
are in shared.model.layers.

Shape suffixes: T tokens, D hidden size (head_dim in heads and pages), H query heads, K KV heads, R = head_dim / 2,
V vocabulary, pages [N, K, S, D] as in shared.kernels.reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernels.cpu.decoder import MAX_HEAD_DIM
from shared.kernels.cpu.library import Team
from tests.kernels.cpu.prototypes import kernel


def embed(team: Team, input_ids_T: torch.Tensor, table_VD: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows of a bf16 table times `scale`, as float32, [T, D]."""
    _check(input_ids_T, torch.int64)
    _check(table_VD, torch.bfloat16)
    out_TD = torch.empty(len(input_ids_T), table_VD.shape[1])
    kernel(team, "baton_embed")(
        team.handle,
        input_ids_T.data_ptr(),
        len(input_ids_T),
        table_VD.data_ptr(),
        table_VD.shape[1],
        scale,
        out_TD.data_ptr(),
    )
    return out_TD


def rms_norm(team: Team, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of float32 rows with a float32 weight, in bf16."""
    _check(x_TD, torch.float32)
    _check(weight_D, torch.float32, *x_TD.shape[1:])
    out_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
    kernel(team, "baton_rms_norm")(
        team.handle, x_TD.data_ptr(), *x_TD.shape, weight_D.data_ptr(), eps, out_TD.data_ptr()
    )
    return out_TD


def add_rms_norm(
    team: Team, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_TD: torch.Tensor
) -> None:
    """Add the norm of float32 rows to other such rows."""
    _check(x_TD, torch.float32)
    _check(weight_D, torch.float32, *x_TD.shape[1:])
    _check(residual_TD, torch.float32, *x_TD.shape)
    kernel(team, "baton_add_rms_norm")(
        team.handle, x_TD.data_ptr(), *x_TD.shape, weight_D.data_ptr(), eps, residual_TD.data_ptr()
    )


def rotary_cos_sin(team: Team, positions_T: torch.Tensor, waves_2R: torch.Tensor) -> torch.Tensor:
    """[T, 2, R] in float32: cosine, then sine of every angle, times amplitudes. `waves_2R` is as in rotary_waves."""
    _check(positions_T, torch.int64)
    _check(waves_2R, torch.float32)
    cos_sin_T2R = torch.empty(len(positions_T), 2, waves_2R.shape[1])
    kernel(team, "baton_rotary_cos_sin")(
        team.handle,
        positions_T.data_ptr(),
        len(positions_T),
        waves_2R.data_ptr(),
        waves_2R.shape[1],
        cos_sin_T2R.data_ptr(),
    )
    return cos_sin_T2R


@dataclass(frozen=True)
class KVPlaces:
    """Pages of one layer, and where each of T tokens goes in them."""

    k_pages_NKSD: torch.Tensor
    v_pages_NKSD: torch.Tensor
    pages_T: torch.Tensor
    offsets_T: torch.Tensor


def norm_rope_write(
    team: Team,
    qkv_TND: torch.Tensor,
    qk_norm_ND: torch.Tensor | None,
    eps: float,
    cos_sin_T2R: torch.Tensor,
    kv: KVPlaces,
) -> torch.Tensor:
    """Norm and rotate q and k of qkv [T, H + 2K, D], write k and v to their places, and return q [T, H, D].

    All of it is bf16, but `qk_norm_ND` [H + K, D] and `cos_sin_T2R`, of `rotary_cos_sin`, which are float32.
    """
    T, N, D = qkv_TND.shape
    _, K, S, _ = kv.k_pages_NKSD.shape
    H = N - 2 * K
    assert D % 16 == 0 and 0 < D <= MAX_HEAD_DIM and H > 0
    _check(qkv_TND, torch.bfloat16)
    _check(cos_sin_T2R, torch.float32, T, 2, D // 2)
    has_codes = kv.k_pages_NKSD.dtype == torch.int8
    for pages_NKSD in (kv.k_pages_NKSD, kv.v_pages_NKSD):
        row = (torch.int8, D + 4) if has_codes else (torch.bfloat16, D)
        _check(pages_NKSD, row[0], *kv.k_pages_NKSD.shape[:3], row[1])
    for place_T in (kv.pages_T, kv.offsets_T):
        _check(place_T, torch.int64, T)
    if qk_norm_ND is not None:
        _check(qk_norm_ND, torch.float32, H + K, D)
    q_THD = torch.empty(T, H, D, dtype=torch.bfloat16)
    kernel(team, "baton_norm_rope_write")(
        team.handle,
        qkv_TND.data_ptr(),
        T,
        H,
        K,
        D,
        None if qk_norm_ND is None else qk_norm_ND.data_ptr(),
        eps,
        cos_sin_T2R.data_ptr(),
        kv.k_pages_NKSD.data_ptr(),
        kv.v_pages_NKSD.data_ptr(),
        S,
        has_codes,
        kv.pages_T.data_ptr(),
        kv.offsets_T.data_ptr(),
        q_THD.data_ptr(),
    )
    return q_THD


def _check(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype == dtype and tensor.is_contiguous()
    assert not shape or tensor.shape == shape
