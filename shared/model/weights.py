"""Reads a decoder's weights from a checkpoint, or another source, layer by layer.

The q, k and v projections of the checkpoint become row ranges of one linear layer, and so do gate and up.
`WeightReader` gives away each linear layer as it is read, so that a caller that packs the weights holds one beside
the packed ones. `load_weights` reads all layers. Names, shapes and types of all tensors are checked before one is
read.

Shape suffixes: V vocabulary, D hidden size (head_dim after a heads axis), N = num_heads + num_kv_heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, TypeVar

import torch

from shared.errors import ModelError
from shared.host_memory import new_mapping
from shared.model.config import ModelConfig
from shared.model.formats.choice import FORMATS
from shared.model.formats.common import LinearSpec
from shared.model.linear import DenseLinear, Linear, quantize_weight, stack
from shared.model.quantization import Layout, Scheme
from shared.model.weight_source import TensorSpec, WeightSource

_EMBED, _NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Rows = dict[str, int]
"""Names of tensors or of linear layers in the checkpoint, with the number of rows of each."""
_LinearRows = tuple[Rows, int, bool]
"""Linear layers that are computed as one: names with outputs, the inputs, whether they have biases."""


L = TypeVar("L")


@dataclass(frozen=True, kw_only=True)
class LayerWeights(Generic[L]):
    """The weights of one layer. A weight that the architecture lacks is None. L is what became of a linear layer."""

    input_norm_D: torch.Tensor
    qkv_proj: L
    qk_norm_ND: torch.Tensor | None
    o_proj: L
    post_attention_norm_D: torch.Tensor
    gate_up_proj: L
    down_proj: L


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The weights of a decoder. With tied embeddings the lm_head is `embed_VD`, unless it is quantized."""

    embed_VD: torch.Tensor
    layers: tuple[LayerWeights[Linear], ...]
    norm_D: torch.Tensor
    lm_head: Linear


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
            layers=tuple(reader.layers(lambda linear, is_gate_up: linear)),
            norm_D=reader.norm(),
            lm_head=reader.lm_head(embed_VD),
        )


class WeightReader:
    """Reads a decoder's weights in the order embed, layers, norm, lm_head, within a `with` block.

    The tensors belong to the caller, and the reader keeps no reference: dropping a layer frees its memory. There is
    one exception. On a CPU, where the embedding table has the dtype of the file, it is a view of the mapped file.
    Then only the rows that are used take memory. Rows that were read within the block are dropped at its end.

    `on_progress` is called with the fraction of elements read so far, the last time with 1.0. Tensors that the
    architecture does not have are ignored. Raises ModelError, which names the tensor or the file, when one is
    missing, corrupt, or has another shape or type than the config says. That is checked before anything is read.
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
        self._tensors = tensor_specs(config)
        source.check(self._tensors)
        self._num_elements = sum(math.prod(tensor.shape) for tensor in self._tensors.values())
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

    def layers(self, keep: Callable[[Linear, bool], L]) -> Iterator[LayerWeights[L]]:
        """Yield each layer in turn, read when it is taken.

        `keep` gets each linear layer when it is read, and whether it is gate and up. What it returns is yielded.
        """
        for i in range(self._config.num_layers):
            yield self._layer(_LayerSpec(self._config, i), keep)

    def norm(self) -> torch.Tensor:
        """Read the final norm [D]."""
        return self._stack({_NORM: self._config.hidden_size})

    def lm_head(self, embed_VD: torch.Tensor) -> Linear:
        """Read the lm_head. A tied one that is not quantized is `embed_VD`."""
        c = self._config
        scheme = _lm_head_scheme(c)
        if scheme is not None and scheme.layout is not Layout.ON_LOAD:
            return self._quantized({"lm_head": c.vocab_size}, c.hidden_size, None)
        if scheme is not None:
            return stack([piece for _, piece in self.lm_head_pieces()], None).to(self._device)
        if c.tie_word_embeddings:
            return DenseLinear(weight_NK=embed_VD, bias_N=None)
        return DenseLinear(weight_NK=self._stack({_LM_HEAD: c.vocab_size}, c.hidden_size), bias_N=None)

    def lm_head_pieces(self) -> Iterator[tuple[int, Linear]]:
        """Yield (index of its first output, outputs) for pieces of the lm_head, tied or not.

        A caller that packs the lm_head needs no whole copy of it beside the packed one. It may be the largest tensor.
        """
        c, scheme = self._config, _lm_head_scheme(self._config)
        if scheme is not None and scheme.layout is not Layout.ON_LOAD:
            layer, form = LinearSpec("lm_head", c.vocab_size, c.hidden_size, scheme), FORMATS[scheme.layout]
            yield from form.pieces(self._source, layer, self._dtype)
            self._count(self._num_stored(layer))
            return
        tied = c.tie_word_embeddings
        for first_row, piece in self._source.pieces(_EMBED if tied else _LM_HEAD):
            if scheme is None:
                dense = piece.to(device=self._device, dtype=self._dtype)
                yield first_row, DenseLinear(weight_NK=dense, bias_N=None)
            else:
                size = LinearSpec("lm_head", c.vocab_size, c.hidden_size, scheme).group_size
                quantized = quantize_weight(piece, bits=scheme.bits, group_size=size)
                yield first_row, replace(quantized, is_weight_only=scheme.is_weight_only)
            if not tied:  # a tied lm_head was counted by `embed`
                self._count(piece.numel())

    def _layer(self, layer: _LayerSpec, keep: Callable[[Linear, bool], L]) -> LayerWeights[L]:
        c = self._config

        def linear(rows: Rows, width: int, has_bias: bool, *, is_gate_up: bool = False) -> L:
            return keep(read(rows, width, has_bias), is_gate_up)

        def read(rows: Rows, width: int, has_bias: bool) -> Linear:
            bias_N = self._stack({f"{name}.bias": n for name, n in rows.items()}) if has_bias else None
            if _scheme_of(c, rows) is not None:
                return self._quantized(rows, width, bias_N)
            weight_NK = self._stack({f"{name}.weight": n for name, n in rows.items()}, width)
            return DenseLinear(weight_NK=weight_NK, bias_N=bias_N)

        def norm(name: str) -> torch.Tensor:
            return self._stack({name: c.hidden_size})

        def qk_norm() -> torch.Tensor:
            """The weights of the q and k norms, repeated for each head, so that one call applies both."""
            q_D, k_D = torch.split(self._stack(layer.qk_norm), c.head_dim)
            return torch.cat([q_D.expand(c.num_heads, -1), k_D.expand(c.num_kv_heads, -1)])

        return LayerWeights(
            input_norm_D=norm(layer.input_norm),
            qkv_proj=linear(*layer.qkv),
            qk_norm_ND=qk_norm() if layer.qk_norm else None,
            o_proj=linear(*layer.o),
            post_attention_norm_D=norm(layer.post_attention_norm),
            gate_up_proj=linear(*layer.gate_up, is_gate_up=True),
            down_proj=linear(*layer.down),
        )

    def _quantized(self, rows: Rows, width: int, bias_N: torch.Tensor | None) -> Linear:
        scheme = _scheme_of(self._config, rows)
        assert scheme is not None
        parts = []
        for name, n in rows.items():
            layer = LinearSpec(name, n, width, scheme)
            parts.append(FORMATS[scheme.layout].read(self._source, layer, self._dtype))
            self._count(self._num_stored(layer))
        return stack(parts, bias_N).to(self._device)

    def _num_stored(self, layer: LinearSpec) -> int:
        """Elements of all tensors of a quantized layer."""
        return sum(
            math.prod(self._tensors[name].shape) for name in FORMATS[layer.scheme.layout].tensors(layer)
        )

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


class _LayerSpec:
    """The names and sizes of one layer's tensors."""

    def __init__(self, c: ModelConfig, i: int) -> None:
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": c.intermediate_size, f"{mlp}.up_proj": c.intermediate_size}
        self.input_norm = f"{layer}.input_layernorm.weight"
        self.post_attention_norm = f"{layer}.post_attention_layernorm.weight"
        self.qk_norm: Rows = (
            {f"{attention}.q_norm.weight": c.head_dim, f"{attention}.k_norm.weight": c.head_dim}
            if c.qk_norm
            else {}
        )
        self.qkv = qkv, c.hidden_size, c.qkv_bias
        self.o = {f"{attention}.o_proj": c.hidden_size}, q_size, c.o_bias
        self.gate_up = gate_up, c.hidden_size, c.mlp_bias
        self.down = {f"{mlp}.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias


def tensor_specs(c: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the architecture. Raises ModelError for layers whose quantization does not fit their sizes."""
    specs = {_EMBED: TensorSpec((c.vocab_size, c.hidden_size)), _NORM: TensorSpec((c.hidden_size,))}

    def note(rows: Rows, width: int, has_bias: bool) -> None:
        scheme = _scheme_of(c, rows)
        for name, n in rows.items():
            if has_bias:
                specs[f"{name}.bias"] = TensorSpec((n,))
            if scheme is None:
                specs[f"{name}.weight"] = TensorSpec((n, width))
            else:
                specs.update(FORMATS[scheme.layout].tensors(LinearSpec(name, n, width, scheme)))

    for linear in _linears(c):
        note(*linear)
    for i in range(c.num_layers):
        layer = _LayerSpec(c, i)
        for norm in (layer.input_norm, layer.post_attention_norm):
            specs[norm] = TensorSpec((c.hidden_size,))
        specs.update({name: TensorSpec((size,)) for name, size in layer.qk_norm.items()})
    return specs


def weights_nbytes(c: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights of all matrices in `dtype`, and of codes with their scales where they are quantized.

    Torch alone, on a CPU, has a byte for each code of 4 bits.
    """
    nbytes = c.vocab_size * c.hidden_size * dtype.itemsize
    linears = list(_linears(c))
    if c.tie_word_embeddings and _lm_head_scheme(c) is not None:
        linears.append(({"lm_head": c.vocab_size}, c.hidden_size, False))
    for rows, width, _ in linears:
        scheme, n = _scheme_of(c, rows), sum(rows.values())
        if scheme is None or not (scheme.has_codes or scheme.keeps_float):
            nbytes += n * width * dtype.itemsize
        else:
            nbytes += n * width * scheme.bits // 8
            nbytes += 4 * n * LinearSpec(next(iter(rows)), n, width, scheme).num_groups
    return nbytes


def _linears(c: ModelConfig) -> Iterator[_LinearRows]:
    """All linear layers of a checkpoint, those that are computed as one together."""
    for i in range(c.num_layers):
        layer = _LayerSpec(c, i)
        yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
    if not c.tie_word_embeddings:
        yield {"lm_head": c.vocab_size}, c.hidden_size, False


def _scheme_of(c: ModelConfig, rows: Rows) -> Scheme | None:
    """The scheme of linear layers that are computed as one. Raises ModelError where they have several."""
    if c.quantization is None:
        return None
    schemes = {name: c.quantization.scheme_of(name) for name in rows}
    if len(set(schemes.values())) > 1:
        raise ModelError(f"{', '.join(rows)} are computed as one layer, but they are quantized differently")
    return next(iter(schemes.values()))


def _lm_head_scheme(c: ModelConfig) -> Scheme | None:
    """A tied lm_head is not in the file, so only `--quantization` quantizes it."""
    scheme = _scheme_of(c, {"lm_head": c.vocab_size})
    return (
        None
        if c.tie_word_embeddings and scheme is not None and scheme.layout is not Layout.ON_LOAD
        else scheme
    )
