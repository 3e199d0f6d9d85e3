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
from shared.model.formats.common import LinearSpec, finite
from shared.model.layer_records import (
    Attention,
    DenseMlp,
    ExpertsMlp,
    Layer,
    Projection,
    Stacked,
    SwigluClamp,
)
from shared.model.linear import DenseLinear, Linear, QuantizedLinear, quantize_weight, stack
from shared.model.quantization import Layout, Scheme
from shared.model.stacked import ExpertReader, stacked_specs
from shared.model.weight_source import TensorReader, TensorSpec, WeightSource

_EMBED, _NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

L = TypeVar("L")


@dataclass(frozen=True, kw_only=True)
class AttentionWeights(Generic[L]):
    """The weights of an `Attention`. L is what became of a linear layer."""

    qkv_proj: L
    qk_norm_ND: torch.Tensor | None
    """The weights for each head of q, then of k."""
    sinks_H: torch.Tensor | None
    norms_whole_qk: bool
    window: int | None
    rope: int
    """As in the `Attention`."""
    o_proj: L


@dataclass(frozen=True, kw_only=True)
class MlpWeights(Generic[L]):
    """The weights of a `DenseMlp`."""

    gate_up_proj: L
    down_proj: L
    is_gelu: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsWeights(Generic[L]):
    """The weights of an `ExpertsMlp`, and how it chooses."""

    router: L
    experts: tuple[MlpWeights[L], ...]
    top_k: int
    is_normalized: bool
    clamp: SwigluClamp | None = None

    @property
    def can_be_grouped(self) -> bool:
        """Whether one launch on a GPU can multiply for all experts: groups must fit matrix instructions."""
        return all(
            isinstance(linear, DenseLinear)
            or (
                isinstance(linear, QuantizedLinear) and linear.order_K is None and linear.group_size % 32 == 0
            )
            for expert in self.experts
            for linear in (expert.gate_up_proj, expert.down_proj)
        )


@dataclass(frozen=True, kw_only=True)
class LayerWeights(Generic[L]):
    """The weights of a `Layer`."""

    attention_norm_D: torch.Tensor
    attention: AttentionWeights[L]
    attention_out_norm_D: torch.Tensor | None
    mlp_norm_D: torch.Tensor
    mlp: MlpWeights[L] | ExpertsWeights[L]
    mlp_out_norm_D: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The weights of a decoder. With tied embeddings the lm_head is `embed_VD`, unless it is quantized."""

    embed_VD: torch.Tensor
    layers: tuple[LayerWeights[Linear], ...]
    norm_D: torch.Tensor
    lm_head: Linear

    @property
    def groups_experts(self) -> bool:
        """Whether all mixtures can be grouped. A loop over experts waits for their choice."""
        return all(layer.mlp.can_be_grouped for layer in self.layers if isinstance(layer.mlp, ExpertsWeights))


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
        tensors = tensor_specs(config)
        source.check(tensors)
        self._num_elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
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
        name = self._config.prefix + _EMBED
        if self._device.type != "cpu" or self._source.dtype(name) != self._dtype:
            return self._stack({name: self._config.vocab_size}, self._config.hidden_size)
        embed_VD = self._source.mapped(name)
        self._count(embed_VD.numel())
        return embed_VD

    def layers(self, keep: Callable[[Linear, bool], L]) -> Iterator[LayerWeights[L]]:
        """Yield each layer in turn, read when it is taken.

        `keep` gets each linear layer when it is read, and whether it is gate and up. What it returns is yielded.
        """
        for layer in self._config.layers:
            yield self._layer(layer, keep)

    def norm(self) -> torch.Tensor:
        """Read the final norm [D]."""
        return self._norm({self._config.prefix + _NORM: self._config.hidden_size})

    def lm_head(self, embed_VD: torch.Tensor) -> Linear:
        """Read the lm_head. A tied one that is not quantized is `embed_VD`."""
        c = self._config
        scheme = _lm_head_scheme(c)
        if scheme is not None and scheme.layout is not Layout.ON_LOAD:
            return self._quantized(_lm_head(c), None, self._source)
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
            self._count(_num_stored(layer))
            return
        tied = c.tie_word_embeddings
        for first_row, piece in self._source.pieces(c.prefix + _EMBED if tied else _LM_HEAD):
            if scheme is None:
                dense = piece.to(device=self._device, dtype=self._dtype)
                yield first_row, DenseLinear(weight_NK=dense, bias_N=None)
            else:
                size = LinearSpec("lm_head", c.vocab_size, c.hidden_size, scheme).group_size
                quantized = quantize_weight(piece, bits=scheme.bits, group_size=size)
                finite("lm_head", quantized.scales_NG)
                yield first_row, replace(quantized, is_weight_only=scheme.is_weight_only)
            if not tied:  # a tied lm_head was counted by `embed`
                self._count(piece.numel())

    def _layer(self, layer: Layer, keep: Callable[[Linear, bool], L]) -> LayerWeights[L]:
        c, attention = self._config, layer.attention
        order_D = self._head_order(attention)

        def qkv() -> Linear:
            """With the elements of the heads of q and k as `Rope.head_order` has them."""
            projected = self._linear(attention.qkv)
            if order_D is None:
                return projected
            order_ND = torch.arange(projected.shape[0], device=self._device).view(-1, c.head_dim)
            order_ND[: -c.num_kv_heads] = order_ND[: -c.num_kv_heads, order_D]
            return projected.with_outputs(order_ND.flatten())

        def linear(projection: Projection, *, is_gate_up: bool = False) -> L:
            return keep(self._linear(projection), is_gate_up)

        def norm(name: str) -> torch.Tensor:
            return self._norm({name: c.hidden_size})

        def out_norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else norm(name)

        def qk_norm(sizes: dict[str, int]) -> torch.Tensor:
            """The weights of the q and k norms for each head, so that one call applies both."""
            q, k = torch.split(self._norm(sizes), list(sizes.values()))
            q_HD, k_KD = attention.q_scale * q.view(-1, c.head_dim), k.view(-1, c.head_dim)
            norms_ND = torch.cat([q_HD.expand(c.num_heads, -1), k_KD.expand(c.num_kv_heads, -1)])
            return norms_ND if order_D is None else norms_ND[:, order_D]

        def dense(mlp: DenseMlp) -> MlpWeights[L]:
            return MlpWeights(
                gate_up_proj=linear(mlp.gate_up, is_gate_up=True),
                down_proj=linear(mlp.down),
                is_gelu=mlp.is_gelu,
            )

        def experts(mlp: ExpertsMlp) -> ExpertsWeights[L]:
            return ExpertsWeights(
                router=linear(mlp.router),
                experts=tuple(dense(expert) for expert in mlp.experts),
                top_k=mlp.top_k,
                is_normalized=mlp.is_normalized,
                clamp=mlp.clamp,
            )

        return LayerWeights(
            attention_norm_D=norm(layer.attention_norm),
            attention=AttentionWeights(
                qkv_proj=keep(qkv(), False),
                qk_norm_ND=qk_norm(_qk_norm_sizes(c, attention)) if attention.qk_norms else None,
                sinks_H=None if attention.sinks is None else self._stack({attention.sinks: c.num_heads}),
                norms_whole_qk=attention.norms_whole_qk,
                window=attention.window,
                rope=attention.rope,
                o_proj=linear(attention.o),
            ),
            attention_out_norm_D=out_norm(layer.attention_out_norm),
            mlp_norm_D=norm(layer.mlp_norm),
            mlp=experts(layer.mlp) if isinstance(layer.mlp, ExpertsMlp) else dense(layer.mlp),
            mlp_out_norm_D=out_norm(layer.mlp_out_norm),
        )

    def _head_order(self, attention: Attention) -> torch.Tensor | None:
        """None: as the checkpoint has them."""
        order = self._config.ropes[attention.rope].head_order(self._config.head_dim)
        return None if order == sorted(order) else torch.tensor(order, device=self._device)

    def _norm(self, sizes: dict[str, int]) -> torch.Tensor:
        """Read what norms multiply by. Where that is 1 + a weight it is float32: bf16 has too few bits for it."""
        weight_D = self._stack(sizes)
        return weight_D.float() + 1 if self._config.norms_add_one else weight_D

    def _linear(self, projection: Projection) -> Linear:
        if projection.stacked is not None:
            return self._expert(projection, projection.stacked)
        bias_N = None
        if projection.has_bias:
            bias_N = self._stack({f"{name}.bias": n for name, n in projection.outputs.items()})
        if _scheme_of(self._config, projection) is not None:
            return self._quantized(projection, bias_N, self._source)
        weights = {f"{name}.weight": n for name, n in projection.outputs.items()}
        return DenseLinear(weight_NK=self._stack(weights, projection.num_inputs), bias_N=bias_N)

    def _expert(self, projection: Projection, stacked: Stacked) -> Linear:
        """Its part of the tensors that all experts of a layer share, gate first."""
        ((name, n),) = projection.outputs.items()
        source = ExpertReader(self._source, stacked)

        def read(part: str) -> torch.Tensor:
            tensor = source.read(f"{name}.{part}").to(device=self._device, dtype=self._dtype)
            self._count(tensor.numel())
            return tensor

        bias_N = read("bias") if projection.has_bias else None
        if _scheme_of(self._config, projection) is None:
            linear: Linear = DenseLinear(weight_NK=read("weight"), bias_N=bias_N)
        else:
            linear = self._quantized(projection, bias_N, source)
        if not stacked.alternates:
            return linear
        return linear.with_outputs(torch.arange(n, device=self._device).view(-1, 2).T.flatten())

    def _quantized(self, projection: Projection, bias_N: torch.Tensor | None, source: TensorReader) -> Linear:
        scheme = _scheme_of(self._config, projection)
        assert scheme is not None
        parts = []
        for name, n in projection.outputs.items():
            layer = LinearSpec(name, n, projection.num_inputs, scheme)
            parts.append(FORMATS[scheme.layout].read(source, layer, self._dtype))
            self._count(_num_stored(layer))
        try:
            return stack(parts, bias_N).to(self._device)
        except ModelError as e:
            raise ModelError(f"{', '.join(projection.outputs)} {e}") from e

    def _stack(self, rows: dict[str, int], *width: int) -> torch.Tensor:
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


def tensor_specs(c: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the architecture. Raises ModelError for layers whose quantization does not fit their sizes."""
    specs = {
        c.prefix + _EMBED: TensorSpec((c.vocab_size, c.hidden_size)),
        c.prefix + _NORM: TensorSpec((c.hidden_size,)),
    }
    for projection in _projections(c):
        scheme = _scheme_of(c, projection)
        for name, n in projection.outputs.items():
            own = {f"{name}.bias": TensorSpec((n,))} if projection.has_bias else {}
            if scheme is None:
                own[f"{name}.weight"] = TensorSpec((n, projection.num_inputs))
            else:
                layer = LinearSpec(name, n, projection.num_inputs, scheme)
                own |= FORMATS[scheme.layout].tensors(layer)
            specs.update(own if projection.stacked is None else stacked_specs(own, projection.stacked))
    for each in c.layers:
        specs.update(dict.fromkeys(each.norms, TensorSpec((c.hidden_size,))))
        specs.update({name: TensorSpec((size,)) for name, size in _qk_norm_sizes(c, each.attention).items()})
        if each.attention.sinks is not None:
            specs[each.attention.sinks] = TensorSpec((c.num_heads,))
        if isinstance(each.mlp, ExpertsMlp):
            _check_experts(c, each.mlp)
    return specs


def weights_nbytes(c: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights of all matrices in `dtype`, and of codes with their scales where they are quantized.

    Torch alone, on a CPU, has a byte for each code of 4 bits.
    """
    nbytes = c.vocab_size * c.hidden_size * dtype.itemsize
    projections = list(_projections(c))
    if c.tie_word_embeddings and _lm_head_scheme(c) is not None:
        projections.append(_lm_head(c))
    for projection in projections:
        scheme, n, k = _scheme_of(c, projection), sum(projection.outputs.values()), projection.num_inputs
        if scheme is None or not (scheme.has_codes or scheme.keeps_float):
            nbytes += n * k * dtype.itemsize
        else:
            nbytes += n * k * scheme.bits // 8
            nbytes += (
                scheme.scale_nbytes * n * LinearSpec(next(iter(projection.outputs)), n, k, scheme).num_groups
            )
    return nbytes


def _num_stored(layer: LinearSpec) -> int:
    """Elements of all tensors of a quantized layer."""
    return sum(math.prod(tensor.shape) for tensor in FORMATS[layer.scheme.layout].tensors(layer).values())


def _qk_norm_sizes(c: ModelConfig, attention: Attention) -> dict[str, int]:
    sizes = (c.num_heads, c.num_kv_heads) if attention.norms_whole_qk else (1, 1)
    return {name: n * c.head_dim for name, n in zip(attention.qk_norms or (), sizes, strict=False)}


def _check_experts(c: ModelConfig, mlp: ExpertsMlp) -> None:
    """Raise ModelError where experts of a layer are quantized differently: one kernel computes all of them."""
    for projections in zip(*((each.gate_up, each.down) for each in mlp.experts), strict=True):
        if len({_scheme_of(c, projection) for projection in projections}) > 1:
            first, last = (next(iter(projections[i].outputs)) for i in (0, -1))
            raise ModelError(f"{first} .. {last} are computed as one, but they are quantized differently")


def _lm_head(c: ModelConfig) -> Projection:
    return Projection({"lm_head": c.vocab_size}, c.hidden_size)


def _projections(c: ModelConfig) -> Iterator[Projection]:
    """All linear layers of a checkpoint, those that are computed as one together."""
    for layer in c.layers:
        yield from layer.projections
    if not c.tie_word_embeddings:
        yield _lm_head(c)


def _scheme_of(c: ModelConfig, projection: Projection) -> Scheme | None:
    """The scheme of linear layers that are computed as one. Raises ModelError where they have several."""
    if c.quantization is None or projection.keeps_type:
        return None
    schemes = {name: c.quantization.scheme_of(name) for name in projection.outputs}
    if len(set(schemes.values())) > 1:
        raise ModelError(
            f"{', '.join(schemes)} are computed as one layer, but they are quantized differently"
        )
    return next(iter(schemes.values()))


def _lm_head_scheme(c: ModelConfig) -> Scheme | None:
    """A tied lm_head is not in the file, so only `--quantization` quantizes it."""
    scheme = _scheme_of(c, _lm_head(c))
    return (
        None
        if c.tie_word_embeddings and scheme is not None and scheme.layout is not Layout.ON_LOAD
        else scheme
    )
