"""The native decoder as Python calls: the structs of `src/decoder.h`, and the object that keeps one alive.

`tests/kernels/cpu/test_structs.py` compares the structs with the C++.

Arrays are passed as pointers. The caller keeps what a struct points to alive: for a batch until its call is over, for
a model as long as the decoder lives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from shared.kernels.cpu.library import Team, check_status

MAX_HEAD_DIM = 256
MAX_GROUP = 192
"""Query heads of one KV head; extend attention takes up to kRows of them at once."""
_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64


class LinearDesc(ctypes.Structure):
    """A weight: `panels` as `src/linear.h` lays them out, `bias` float32 [n] or null."""

    _fields_ = (("panels", _Pointer), ("bias", _Pointer), ("n", _Int), ("k", _Int))


class LayerDesc(ctypes.Structure):
    """Norms are float32; that of heads is null where the model has none."""

    _fields_ = (
        ("input_norm", _Pointer),
        ("post_attention_norm", _Pointer),
        ("qk_norm", _Pointer),
        ("qkv", LinearDesc),
        ("o", LinearDesc),
        ("gate_up", LinearDesc),
        ("down", LinearDesc),
    )


class DecoderDesc(ctypes.Structure):
    """A model: sizes in elements, `embed` bf16 [vocab_size][hidden_size], everything small float32."""

    _fields_ = (
        ("vocab_size", _Int),
        ("hidden_size", _Int),
        ("num_layers", _Int),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_dim", _Int),
        ("intermediate_size", _Int),
        ("rms_norm_eps", ctypes.c_float),
        ("rotary_frequencies", _Pointer),
        ("embed", _Pointer),
        ("norm", _Pointer),
        ("lm_head", LinearDesc),
        ("layers", _Pointer),
    )


class KVPool(ctypes.Structure):
    """The pages of a TokenToKVPool."""

    _fields_ = (("pages", _Pointer), ("num_pages", _Int), ("page_size", _Int))


class BatchDesc(ctypes.Structure):
    """One forward; `src/decoder.h` says what each field is. All arrays are int64 but the page table (int32), logits
    and hidden (float32).
    """

    _fields_ = (
        ("num_sequences", _Int),
        ("num_decodes", _Int),
        ("rows", _Pointer),
        ("starts", _Pointer),
        ("lengths", _Pointer),
        ("page_table", _Pointer),
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
    """One model over one KV pool. One thread at a time calls it; each call lets go of the GIL."""

    def __init__(self, team: Team, model: DecoderDesc, pool: KVPool, kept: Sequence[object]) -> None:
        self._library = team.library
        self._kept = kept
        self._handle: int | None = self._library.baton_decoder_new(
            team.handle, ctypes.byref(model), ctypes.byref(pool)
        )
        if self._handle is None:
            raise MemoryError("for a decoder's own arrays")

    def forward(self, batch: BatchDesc) -> None:
        """Compute a batch. Raises IndexError for an id that is not of the vocabulary, and MemoryError."""
        check_status(self._library.baton_decoder_forward(self._handle, ctypes.byref(batch)))

    def logits(self, hidden: int, num_rows: int, out: int) -> None:
        """Logits of rows of `BatchDesc.hidden`; pointers to float32. Raises MemoryError."""
        check_status(self._library.baton_decoder_logits(self._handle, hidden, num_rows, out))

    def close(self) -> None:
        """Free its scratch memory. No call may run."""
        if self._handle is not None:
            self._library.baton_decoder_free(self._handle)
            self._handle = None
