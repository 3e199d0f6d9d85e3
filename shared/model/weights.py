"""Reads a decoder's weights from a checkpoint, or another source, into fused buffers.

The q, k and v projections of the checkpoint become row ranges of one buffer, and so do gate and up. `WeightReader`
yields one layer at a time, so that a caller that packs the weights holds one layer beside the packed ones.
`load_weights` reads all layers. Names and shapes of all tensors are checked before the first one is read.

Shape suffixes: V vocabulary, D hidden size (head_dim after a heads axis), N = num_heads + num_kv_heads,
A = num_heads * head_dim, Q = (num_heads + 2 * num_kv_heads) * head_dim, F intermediate size, G = 2 * F.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from shared.host_memory import new_mapping
from shared.model.config import ModelConfig

_EMBED, _NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Rows = dict[str, int]
"""Names of tensors in the checkpoint, with the number of rows of each."""
Stack = Callable[..., torch.Tensor]
"""stack(rows, *width) returns one buffer with several tensors one after the other along the first axis."""


class WeightSource(Protocol):
    """Where tensors come from: a `Checkpoint`, or `DummyWeights`."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError unless all these tensors can be had, each in its shape. Called once, before the others."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        ...

    def mapped(self, name: str) -> torch.Tensor:
        """A tensor of that type."""
        ...

    def copy_tensor(self, name: str, out: torch.Tensor, on_copied: Callable[[int], None]) -> None:
        """Copy a tensor into `out`, converted to its type. `on_copied` gets the number of elements of each piece."""
        ...

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of its first row, rows) for pieces of a tensor. A piece is good until the next is taken."""
        ...

    def close(self) -> None:
        """Close files. Tensors from `mapped` stay valid."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The weights of one layer. Matmul weights are [out, in]. A weight that the architecture lacks is None."""

    input_norm_D: torch.Tensor
    qkv_proj_QD: torch.Tensor
    qkv_bias_Q: torch.Tensor | None
    qk_norm_ND: torch.Tensor | None
    o_proj_DA: torch.Tensor
    o_bias_D: torch.Tensor | None
    post_attention_norm_D: torch.Tensor
    gate_up_proj_GD: torch.Tensor
    gate_up_bias_G: torch.Tensor | None
    down_proj_DF: torch.Tensor
    down_bias_D: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The weights of a decoder. With tied embeddings `lm_head_VD` is `embed_VD`."""

    embed_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    lm_head_VD: torch.Tensor


def load_weights(
    source: WeightSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None] | None = None,
) -> DecoderWeights:
    """Load the weights of `source` onto `device` as `dtype`, and close it.

    `WeightReader` describes `on_progress` and the ModelErrors.
    """
    with WeightReader(source, config, dtype=dtype, device=device, on_progress=on_progress) as reader:
        embed_VD = reader.embed()
        return DecoderWeights(
            embed_VD=embed_VD,
            layers=tuple(reader.layers()),
            norm_D=reader.norm(),
            lm_head_VD=embed_VD if config.tie_word_embeddings else reader.lm_head(),
        )


class WeightReader:
    """Reads a decoder's weights in the order embed, layers, norm, lm_head, within a `with` block.

    The tensors belong to the caller, and the reader keeps no reference: dropping a layer frees its memory. There is
    one exception. On a CPU, where the embedding table has the dtype of the file, it is a view of the mapped file.
    Then only the rows that are used take memory. Rows that were read within the block are dropped at its end.

    `on_progress` is called with the fraction of elements read so far, the last time with 1.0. Tensors that the
    architecture does not have are ignored. Raises ModelError, which names the tensor or the file, when one is
    missing, has the wrong shape, is quantized or corrupt. That is checked before anything is read.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress or (lambda fraction: None)
        self._source = source
        shapes = tensor_shapes(config)
        source.check(shapes)
        self._num_elements = sum(map(math.prod, shapes.values()))
        self._num_read = 0

    def __enter__(self) -> WeightReader:
        """Enter the block. Nothing is read yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the source, which drops what is resident of its files."""
        self._source.close()

    def embed(self) -> torch.Tensor:
        """Read the embedding table [V, D]. With tied embeddings it is the lm_head too."""
        if self._device.type != "cpu" or self._source.dtype(_EMBED) != self._dtype:
            return self._stack({_EMBED: self._config.vocab_size}, self._config.hidden_size)
        embed_VD = self._source.mapped(_EMBED)
        self._count(embed_VD.numel())
        return embed_VD

    def layers(self) -> Iterator[LayerWeights]:
        """Yield each layer in turn. A layer is read when it is taken."""
        for i in range(self._config.num_layers):
            yield _layer(self._config, i, self._stack)

    def norm(self) -> torch.Tensor:
        """Read the final norm [D]."""
        return self._stack({_NORM: self._config.hidden_size})

    def lm_head(self) -> torch.Tensor:
        """Read the lm_head [V, D] of a model whose embeddings are not tied."""
        return self._stack({_LM_HEAD: self._config.vocab_size}, self._config.hidden_size)

    def lm_head_pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of its first row, rows) for pieces of the lm_head, tied or not.

        A caller that packs the lm_head needs no whole copy of it beside the packed one. It may be the largest tensor.
        """
        tied = self._config.tie_word_embeddings
        for first_row, piece in self._source.pieces(_EMBED if tied else _LM_HEAD):
            yield first_row, piece.to(device=self._device, dtype=self._dtype)
            if not tied:  # a tied lm_head was counted by `embed`
                self._count(piece.numel())

    def _stack(self, rows: Rows, *width: int) -> torch.Tensor:
        """Read tensors into one new buffer."""
        shape = (sum(rows.values()), *width)
        if self._device.type == "cpu":
            buffer = new_mapping(math.prod(shape) * self._dtype.itemsize).view(self._dtype).view(shape)
        else:
            buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part, name in zip(torch.split(buffer, list(rows.values())), rows, strict=True):
            self._source.copy_tensor(name, part, self._count)
        return buffer

    def _count(self, num_elements: int) -> None:
        self._num_read += num_elements
        self._on_progress(self._num_read / self._num_elements)


def tensor_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the architecture."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(rows: Rows, *width: int) -> torch.Tensor:
        shapes.update({name: (num_rows, *width) for name, num_rows in rows.items()})
        # A view of one element. Operations on the meta device would import torch's compiler, which takes 190 MB.
        return torch.zeros(()).expand(sum(rows.values()), *width)

    note({_EMBED: c.vocab_size}, c.hidden_size)
    for i in range(c.num_layers):
        _layer(c, i, note)
    note({_NORM: c.hidden_size})
    if not c.tie_word_embeddings:
        note({_LM_HEAD: c.vocab_size}, c.hidden_size)
    return shapes


def _layer(c: ModelConfig, i: int, stack: Stack) -> LayerWeights:
    layer = f"model.layers.{i}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    gate_up = {f"{mlp}.gate_proj": c.intermediate_size, f"{mlp}.up_proj": c.intermediate_size}
    o, down = {f"{attention}.o_proj": c.hidden_size}, {f"{mlp}.down_proj": c.hidden_size}

    def weight(rows: Rows, width: int) -> torch.Tensor:
        return stack({f"{name}.weight": num_rows for name, num_rows in rows.items()}, width)

    def bias(rows: Rows) -> torch.Tensor:
        return stack({f"{name}.bias": num_rows for name, num_rows in rows.items()})

    def norm(name: str) -> torch.Tensor:
        return stack({f"{layer}.{name}.weight": c.hidden_size})

    def qk_norm() -> torch.Tensor:
        """The weights of the q and k norms, repeated for each head, so that one call applies both."""
        both = stack({f"{attention}.q_norm.weight": c.head_dim, f"{attention}.k_norm.weight": c.head_dim})
        q_D, k_D = torch.split(both, c.head_dim)
        return torch.cat([q_D.expand(c.num_heads, -1), k_D.expand(c.num_kv_heads, -1)])

    return LayerWeights(
        input_norm_D=norm("input_layernorm"),
        qkv_proj_QD=weight(qkv, c.hidden_size),
        qkv_bias_Q=bias(qkv) if c.qkv_bias else None,
        qk_norm_ND=qk_norm() if c.qk_norm else None,
        o_proj_DA=weight(o, q_size),
        o_bias_D=bias(o) if c.o_bias else None,
        post_attention_norm_D=norm("post_attention_layernorm"),
        gate_up_proj_GD=weight(gate_up, c.hidden_size),
        gate_up_bias_G=bias(gate_up) if c.mlp_bias else None,
        down_proj_DF=weight(down, c.intermediate_size),
        down_bias_D=bias(down) if c.mlp_bias else None,
    )
