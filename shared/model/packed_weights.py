"""A decoder's weights in the layout of the native kernels: linear weights in panels, all others in float32.

A linear layer is packed as soon as it is read, so loading needs memory for one copy of the weights and one such
layer. The embedding table is not packed. It is a view of the mapped file where the file has bfloat16. With tied
embeddings the table is in memory twice: as rows, of which a forward reads a few, and as the panels of the lm_head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from shared.host_memory import trim_heap
from shared.kernels.cpu.decoder import (
    MAX_GROUP,
    MAX_GROUP_K,
    MAX_HEAD_DIM,
    DecoderDesc,
    ExpertsDesc,
    LayerDesc,
    LinearDesc,
)
from shared.kernels.cpu.library import Team
from shared.kernels.cpu.linear import (
    PanelArena,
    in_panels,
    middle_exchanged,
    nibbles,
    pack_gate_up,
    pack_rows,
)
from shared.model.config import ModelConfig
from shared.model.linear import DenseLinear, Linear, QuantizedLinear, stack
from shared.model.rotary import rotary_waves
from shared.model.weight_source import WeightSource
from shared.model.weights import ExpertsWeights, LayerWeights, WeightReader


def native_obstacle(config: ModelConfig) -> str | None:
    """Return why the native kernels cannot compute a model of this shape. None where they can."""
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is no multiple of 16 up to {MAX_HEAD_DIM}"
    group = config.num_heads // config.num_kv_heads
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, more than {MAX_GROUP}"
    if odd := [width for width in config.widths if width % 2]:
        return f"a layer has {odd[0]} inputs, which is odd"
    for _, scheme in config.quantization.schemes if config.quantization is not None else ():
        if not scheme.has_codes:
            continue
        codes = 32 // scheme.bits  # of a unit
        for k in (scheme.group_size or codes, *sorted(config.widths)):
            if k % codes or k > MAX_GROUP_K:
                return f"a group or a layer of {k} inputs is no multiple of {codes} up to {MAX_GROUP_K}"
    return None


@dataclass(frozen=True)
class PackedWeights:
    """A decoder for `NativeDecoder`. `desc` has pointers into the objects in `kept`, which keeps them alive."""

    desc: DecoderDesc
    kept: tuple[object, ...]


def load_packed_weights(
    source: WeightSource,
    config: ModelConfig,
    team: Team,
    *,
    on_progress: Callable[[float], None] | None = None,
) -> PackedWeights:
    """Read and pack the weights of `source`. `WeightReader` describes `on_progress` and the ModelErrors."""
    packer = Packer(team)
    cpu = torch.device("cpu")
    with WeightReader(source, config, dtype=torch.bfloat16, device=cpu, on_progress=on_progress) as reader:
        embed_VD = reader.embed()
        layers = (LayerDesc * config.num_layers)(
            *(packer.layer(layer) for layer in reader.layers(packer.linear))
        )
        norm = packer.floats(reader.norm())
        lm_head = packer.lm_head(config, reader.lm_head_pieces())
    trim_heap()
    desc = DecoderDesc(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        embed_scale=torch.tensor(config.embed_scale, dtype=torch.bfloat16).item(),
        num_ropes=len(config.ropes),
        rotary_waves=packer.floats(
            torch.stack([rotary_waves(rope, config.head_dim, cpu) for rope in config.ropes])
        ),
        embed=embed_VD.data_ptr(),
        norm=norm,
        lm_head=lm_head,
        layers=ctypes.addressof(layers),
    )
    return PackedWeights(desc, (embed_VD, layers, *packer.kept))


@dataclass
class Packer:
    """Packs layers into descs, and keeps the objects alive that the descs point to."""

    team: Team
    arena: PanelArena = field(default_factory=PanelArena)
    kept: list[object] = field(default_factory=list)

    def layer(self, layer: LayerWeights[LinearDesc]) -> LayerDesc:
        """The layer of packed linear layers."""
        desc = LayerDesc(
            attention_norm=self.floats(layer.attention_norm_D),
            attention_out_norm=self.floats(layer.attention_out_norm_D),
            mlp_norm=self.floats(layer.mlp_norm_D),
            mlp_out_norm=self.floats(layer.mlp_out_norm_D),
            qk_norm=self.floats(layer.attention.qk_norm_ND),
            sinks=self.floats(layer.attention.sinks_H),
            qkv=layer.attention.qkv_proj,
            o=layer.attention.o_proj,
            whole_qk=layer.attention.norms_whole_qk,
            window=layer.attention.window or 0,
            rope=layer.attention.rope,
        )
        if isinstance(layer.mlp, ExpertsWeights):
            experts = self.experts(layer.mlp)
            self.kept.append(experts)
            desc.experts = ctypes.addressof(experts)
        else:
            desc.gate_up, desc.down = layer.mlp.gate_up_proj, layer.mlp.down_proj
            desc.gelu = layer.mlp.is_gelu
        return desc

    def linear(self, linear: Linear, is_gate_up: bool = False) -> LinearDesc:
        """Pack a linear layer, gate and up as `linear_silu_mul` reads them."""
        rows_NB = _rows_of(linear)
        panels = self.arena.new_panels(len(rows_NB), rows_NB.shape[1] * rows_NB.itemsize)
        if is_gate_up:
            gate_FB, up_FB = rows_NB.chunk(2)
            pack_gate_up(self.team, gate_FB, up_FB, panels)
        else:
            pack_rows(self.team, rows_NB, panels)
        return self._desc(linear, panels, is_gate_up=is_gate_up)

    def experts(self, weights: ExpertsWeights[LinearDesc]) -> ExpertsDesc:
        """The experts of packed linear layers."""
        experts = weights.experts
        gate_up = (LinearDesc * len(experts))(*(each.gate_up_proj for each in experts))
        down = (LinearDesc * len(experts))(*(each.down_proj for each in experts))
        self.kept += [gate_up, down]
        desc = ExpertsDesc(
            router=weights.router,
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
            num_experts=len(experts),
            top_k=weights.top_k,
            normalized=weights.is_normalized,
        )
        if weights.clamp is not None:
            desc.limit, desc.alpha = weights.clamp.limit, weights.clamp.alpha
        return desc

    def lm_head(self, c: ModelConfig, pieces: Iterator[tuple[int, Linear]]) -> LinearDesc:
        """Pack the lm_head piece by piece."""
        panels, kept = None, list[Linear]()
        for first_row, piece in pieces:
            rows_RB = _rows_of(piece)
            if panels is None:
                panels = self.arena.new_panels(c.vocab_size, rows_RB.shape[1] * rows_RB.itemsize)
            pack_rows(self.team, rows_RB, panels, first_row)
            kept.append(_without_rows(piece))
        assert panels is not None
        quantized = [piece for piece in kept if isinstance(piece, QuantizedLinear)]
        return self._desc(stack(quantized, None) if quantized else kept[0], panels, n=c.vocab_size)

    def floats(self, values: torch.Tensor | None) -> int | None:
        """Return the address of a float32 copy of `values`. None for None."""
        return self._copy(values, torch.float32)

    def _exponents(self, powers: torch.Tensor) -> int | None:
        """The exponents of powers of two, as float32 has them."""
        return self._copy(powers.view(torch.int32) >> 23, torch.uint8)

    def _copy(self, values: torch.Tensor | None, dtype: torch.dtype) -> int | None:
        if values is None:
            return None
        copy = values.to(dtype, copy=True).contiguous()
        self.kept.append(copy)
        return copy.data_ptr()

    def _desc(
        self, linear: Linear, panels: torch.Tensor, *, n: int | None = None, is_gate_up: bool = False
    ) -> LinearDesc:
        self.kept.append(panels)
        desc = LinearDesc(
            panels.data_ptr(), self.floats(linear.bias_N), n or linear.shape[0], linear.shape[1], 16
        )
        if isinstance(linear, QuantizedLinear):
            desc.bits, desc.group = linear.bits, linear.group_size
            scales = in_panels(linear.scales_NG, is_gate_up=is_gate_up)
            desc.is_float = linear.is_float
            desc.scales = self._exponents(scales) if linear.is_float else self.floats(scales)
            if linear.zeros_NG is not None:
                desc.zeros = self._copy(in_panels(linear.zeros_NG, is_gate_up=is_gate_up), torch.uint8)
            desc.order = self._copy(linear.order_K, torch.int32)
            desc.weight_only = linear.is_weight_only
        return desc


def _without_rows(piece: Linear) -> Linear:
    """The rest of a piece whose rows were packed: its sizes and scales."""
    if isinstance(piece, DenseLinear):
        return replace(piece, weight_NK=piece.weight_NK[:0].clone())
    return replace(piece, codes_NK=piece.codes_NK[:0].clone())


def _rows_of(linear: Linear) -> torch.Tensor:
    """The rows that are packed: bf16, or bytes of codes."""
    if isinstance(linear, DenseLinear):
        return linear.weight_NK
    codes_NK = middle_exchanged(linear.codes_NK) if linear.is_weight_only else linear.codes_NK
    return codes_NK if linear.bits == 8 else nibbles(codes_NK)
