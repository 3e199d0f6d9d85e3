"""The Python side of the native decoder and sampler: their structs, the object that owns a decoder, the calls.

`tests/kernels/cpu/test_structs.py` compares the structs with those of C++.

Arrays are passed as pointers. The caller keeps the arrays of a batch alive until the call returns, and those of a
model as long as the decoder lives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from shared.kernels.cpu.library import Team

MAX_HEAD_DIM = 256
MAX_GROUP = 192
"""Most query heads of one KV head. A task of extend attention has kRows rows of (token, query head)."""
MAX_GROUP_K = 65_536
"""Most inputs of a quantized layer: sums of products of codes are of 32 bits, and 65,536 * 255 * 127 < 2 ** 31."""
_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64
_UNKNOWN_TOKEN, _OUT_OF_MEMORY = 1, 2


class LinearDesc(ctypes.Structure):
    """A linear weight: `panels` in the layout of `src/linear.h`, `bias` float32 [n] or null.

    `bits` is 16 for bf16. The fields behind it are those of 8 and 4: float32, uint8 and int32. `is_float` is 1 for
    FP4, whose scales are uint8. `weight_only` is 1 where activations stay in 16 bits.
    """

    _fields_ = (
        ("panels", _Pointer),
        ("bias", _Pointer),
        ("n", _Int),
        ("k", _Int),
        ("bits", _Int),
        ("is_float", _Int),
        ("group", _Int),
        ("scales", _Pointer),
        ("zeros", _Pointer),
        ("order", _Pointer),
        ("weight_only", _Int),
    )


class ExpertsDesc(ctypes.Structure):
    """A sparse MLP. `gate_up` and `down` are arrays of a LinearDesc for each expert. Without a clamp `limit` is 0."""

    _fields_ = (
        ("router", LinearDesc),
        ("gate_up", _Pointer),
        ("down", _Pointer),
        ("num_experts", _Int),
        ("top_k", _Int),
        ("normalized", _Int),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )


class LayerDesc(ctypes.Structure):
    """A layer. Norms and sinks are float32, and null where the model has none. With 1 in `whole_qk` q is normed as a
    whole, and so is k.

    `window` is 0 where a token sees all keys. `rope` is the index of the layer's waves. `experts` points to an
    ExpertsDesc, or is null where the MLP is dense. `gelu` is 1 where a dense MLP has GELU in place of SiLU.
    """

    _fields_ = (
        ("attention_norm", _Pointer),
        ("attention_out_norm", _Pointer),
        ("mlp_norm", _Pointer),
        ("mlp_out_norm", _Pointer),
        ("qk_norm", _Pointer),
        ("sinks", _Pointer),
        ("window", _Int),
        ("rope", _Int),
        ("qkv", LinearDesc),
        ("o", LinearDesc),
        ("whole_qk", _Int),
        ("gate_up", LinearDesc),
        ("down", LinearDesc),
        ("gelu", _Int),
        ("experts", _Pointer),
    )


class DecoderDesc(ctypes.Structure):
    """A model: sizes in elements, `embed` bf16 [vocab_size][hidden_size], norms and waves float32.

    `rotary_waves` has those of `num_ropes` rotary embeddings, one after the other.
    """

    _fields_ = (
        ("vocab_size", _Int),
        ("hidden_size", _Int),
        ("num_layers", _Int),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_dim", _Int),
        ("rms_norm_eps", ctypes.c_float),
        ("embed_scale", ctypes.c_float),
        ("num_ropes", _Int),
        ("rotary_waves", _Pointer),
        ("embed", _Pointer),
        ("norm", _Pointer),
        ("lm_head", LinearDesc),
        ("layers", _Pointer),
    )


class KVPool(ctypes.Structure):
    """The pages of a TokenToKVPool, or of both of a WindowedKVPool. `has_codes` is 1 where they hold codes of 8 bits.

    `window_pages` is null where layers with windows have no pool of their own.
    """

    _fields_ = (
        ("pages", _Pointer),
        ("num_pages", _Int),
        ("window_pages", _Pointer),
        ("num_window_pages", _Int),
        ("page_size", _Int),
        ("has_codes", _Int),
    )


class BatchDesc(ctypes.Structure):
    """One forward. `src/decoder.h` describes the fields.

    All arrays are int64, except both page tables (int32), `logits` and `hidden` (float32).
    """

    _fields_ = (
        ("num_sequences", _Int),
        ("num_decodes", _Int),
        ("rows", _Pointer),
        ("starts", _Pointer),
        ("lengths", _Pointer),
        ("page_table", _Pointer),
        ("window_table", _Pointer),
        ("table_stride", _Int),
        ("input_ids", _Pointer),
        ("last_tokens", _Pointer),
        ("num_future_writes", _Int),
        ("future_rows", _Pointer),
        ("future_tokens", _Pointer),
        ("num_sampled", _Int),
        ("sampled", _Pointer),
        ("logits", _Pointer),
        ("num_hidden", _Int),
        ("hidden_rows", _Pointer),
        ("hidden", _Pointer),
        ("progress", _Pointer),
    )


class NativeDecoder:
    """One model over one KV pool. One thread at a time may call it. Each call releases the GIL."""

    def __init__(self, team: Team, model: DecoderDesc, pool: KVPool, kept: Sequence[object]) -> None:
        self._library = team.library
        self._kept = kept
        self._handle: int | None = self._library.baton_decoder_new(
            team.handle, ctypes.byref(model), ctypes.byref(pool)
        )
        if self._handle is None:
            raise MemoryError("there is no memory for the arrays of a decoder")

    def forward(self, batch: BatchDesc) -> None:
        """Compute a batch. Raises IndexError for an id outside the vocabulary, and MemoryError."""
        _check_status(self._library.baton_decoder_forward(self._handle, ctypes.byref(batch)))

    def logits(self, hidden: int, num_rows: int, out: int) -> None:
        """Compute the logits of rows of `BatchDesc.hidden`. Both are pointers to float32. Raises MemoryError."""
        _check_status(self._library.baton_decoder_logits(self._handle, hidden, num_rows, out))

    def close(self) -> None:
        """Free the decoder. No call may be running."""
        if self._handle is not None:
            self._library.baton_decoder_free(self._handle)
            self._handle = None


# ---------------------------------------------------------------------------- sampling, of `src/sampling.h`
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
    _check_status(
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


def _check_status(status: int) -> None:
    """Raise the error of a native call's status (`Status` in `src/status.h`): IndexError or MemoryError."""
    if status == _UNKNOWN_TOKEN:
        raise IndexError("a token id is outside the vocabulary of the model")
    if status == _OUT_OF_MEMORY:
        raise MemoryError("there is no memory for what this forward computes")
